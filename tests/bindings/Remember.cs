// Tells memories to the class of the Unity sample, and prints the one that each question brings back.

using System;
using System.Linq;
using System.Threading;
using Frameshard;

internal static class Remember
{
    private static void Main(string[] args)
    {
        var options = new LaunchOptions
        {
            Model = "none", Embedder = args[0], ExtraJson = args[1],
            Python = Environment.GetEnvironmentVariable("FRAMESHARD_PYTHON"),
        };
        using (var sidecar = Sidecar.Launch(options))
        {
            var memories = new Memories();
            sidecar.Run(Told(memories, sidecar));
            foreach (var question in new[] { "Where did I leave my key?", "Did anybody see my pet?" })
            {
                Console.WriteLine(sidecar.Run(memories.Recall(sidecar, question, 1))[0]);
            }
            var late = sidecar.EmbedAsync(new[] { "The key is under the mill." });
            while (!late.IsCompleted)
            {
                ReusedMemory.Poll(sidecar);
                Thread.Sleep(5);
            }
            Console.WriteLine(late.Result.Rows[0].Any(value => value != 0));
        }
    }

    private static async System.Threading.Tasks.Task<bool> Told(Memories memories, Sidecar sidecar)
    {
        await memories.Add(sidecar, "I am looking for my dog.", "The key is under the mill.", "It rained.");
        return memories.Texts.Count == memories.Rows.Count;
    }
}
