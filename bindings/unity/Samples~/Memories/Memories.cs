using System.Collections.Generic;
using System.Linq;
using System.Threading.Tasks;
using Frameshard;

/// <summary>
/// What a character remembers: texts and their embeddings. Save both beside the game's save, with ModelInfo.Embedder:
/// rows of different encoders cannot be compared.
/// </summary>
public sealed class Memories
{
    public readonly List<string> Texts = new List<string>();
    public readonly List<float[]> Rows = new List<float[]>();

    public async Task Add(Sidecar sidecar, params string[] texts)
    {
        var embeddings = await sidecar.EmbedAsync(texts);
        Texts.AddRange(texts);
        Rows.AddRange(embeddings.Rows);
    }

    /// <summary>The texts that resemble the question most, the closest first.</summary>
    public async Task<string[]> Recall(Sidecar sidecar, string question, int count)
    {
        var asked = (await sidecar.EmbedAsync(new[] { question })).Rows[0];
        return Enumerable.Range(0, Texts.Count).OrderByDescending(index => Likeness(Rows[index], asked))
            .Take(count).Select(index => Texts[index]).ToArray();
    }

    /// <summary>The cosine of two rows: their dot product, because the squares of a row add up to 1.</summary>
    private static float Likeness(float[] a, float[] b)
    {
        var sum = 0f;
        for (var index = 0; index < a.Length; index++) sum += a[index] * b[index];
        return sum;
    }
}
