using System;
using Frameshard;
using Frameshard.Unity;
using UnityEngine;

/// <summary>A tavern made of the engine's own shapes, with Mira, who answers what you type. The slider sets the VRAM that
/// she may hold, also during an answer.</summary>
public sealed class Tavern : MonoBehaviour
{
    private const int Margin = 20, BubbleWidth = 460;
    private const float SpeakingHz = 6, NodMetres = 0.03f;

    [SerializeField] private FrameshardSidecar sidecar;
    [SerializeField] private FrameshardNpc npc;

    private GameObject _head;
    private string _question = "Good evening! What is for supper?";
    private string _answer = "Mira is coming down the stairs ...";
    private string _vram = "";
    private float _budgetMb, _askedMb, _floorMb, _fullMb;
    private bool _speaks;

    private bool IsReady => _fullMb > 0 && sidecar.Client != null && sidecar.Error == null;

    private void Start()
    {
        Furnish();
        npc.OnToken += text => _answer += text;
        sidecar.OnReady += Show;
        sidecar.OnBudgetChanged += now => _vram = $"VRAM: {now.UsedBytes >> 20} of {now.BudgetBytes >> 20} MiB";
        sidecar.OnError += error => _answer = $"{error.Name}: {error.Message}"; // also of a refused request
    }

    private void Furnish()
    {
        Shape(PrimitiveType.Cube, new Vector3(0, -1, 3), new Vector3(12, 0.2f, 8), new Color(0.29f, 0.19f, 0.13f));
        Shape(PrimitiveType.Cube, new Vector3(0, 2, 6), new Vector3(12, 6, 0.2f), new Color(0.17f, 0.11f, 0.08f));
        Shape(PrimitiveType.Cube, new Vector3(1.4f, -0.3f, 0.6f), new Vector3(3.4f, 1.2f, 0.8f),
            new Color(0.48f, 0.29f, 0.15f));
        Shape(PrimitiveType.Capsule, new Vector3(1.4f, 0.3f, 1.5f), new Vector3(0.9f, 0.8f, 0.6f),
            new Color(0.54f, 0.18f, 0.18f));
        _head = Shape(PrimitiveType.Sphere, HeadAt(0), new Vector3(0.6f, 0.7f, 0.6f), new Color(0.91f, 0.73f, 0.59f));
    }

    private static Vector3 HeadAt(float nod) => new Vector3(1.4f, 1.35f + nod, 1.5f);

    private static GameObject Shape(PrimitiveType kind, Vector3 place, Vector3 size, Color color)
    {
        var made = GameObject.CreatePrimitive(kind);
        made.transform.position = place;
        made.transform.localScale = size;
        made.GetComponent<Renderer>().material.color = color;
        return made;
    }

    private void Show(ModelInfo model)
    {
        _floorMb = model.FloorBytes / 1048576f;
        _fullMb = _askedMb = _budgetMb = model.FullBytes / 1048576f;
        _vram = model.Name;
        _answer = "";
    }

    private void OnGUI()
    {
        GUILayout.BeginArea(new Rect(Margin, Margin, BubbleWidth, Screen.height - 2 * Margin));
        GUILayout.Label(sidecar.Error == null ? _answer : $"{sidecar.Error.Name}: {sidecar.Error.Message}");
        _question = GUILayout.TextField(_question);
        if (GUILayout.Button("Ask") && IsReady && !_speaks) Ask(_question);
        GUILayout.Label(_vram);
        _budgetMb = GUILayout.HorizontalSlider(_budgetMb, _floorMb, _fullMb);
        GUILayout.EndArea();
    }

    private void Update()
    {
        var nod = _speaks ? NodMetres * Mathf.Sin(Time.time * SpeakingHz * 2 * Mathf.PI) : 0;
        _head.transform.position = HeadAt(nod);
        if (IsReady && Math.Abs(_budgetMb - _askedMb) >= 1) Budget(_budgetMb);
    }

    private async void Ask(string question)
    {
        _answer = "";
        _speaks = true;
        try
        {
            await npc.AskAsync(question);
        }
        catch (OperationCanceledException) // she is disabled, or npc.Cancel was called
        {
        }
        catch (FrameshardException error)
        {
            _answer = $"{error.Name}: {error.Message}";
        }
        finally
        {
            _speaks = false;
        }
    }

    private async void Budget(float mb)
    {
        _askedMb = mb;
        try
        {
            await sidecar.SetBudgetAsync(mb);
        }
        catch (FrameshardException error)
        {
            _vram = error.Message;
        }
    }
}
