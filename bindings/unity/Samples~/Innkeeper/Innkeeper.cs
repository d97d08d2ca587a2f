using System;
using System.IO;
using Frameshard;
using Frameshard.Unity;
using UnityEngine;

/// <summary>
/// Put it on an object with a FrameshardSidecar (its model set) and a FrameshardNpc (its sidecar set) and press Play.
/// </summary>
public sealed class Innkeeper : MonoBehaviour
{
    [SerializeField] private FrameshardSidecar sidecar;
    [SerializeField] private FrameshardNpc npc;

    private string _question = "Any rooms left?";
    private string _answer = "";
    private string _vram = "loading ...";
    private float _budgetMb, _askedMb, _floorMb, _fullMb;
    private bool _busy;

    private bool IsReady => _fullMb > 0 && sidecar.Client != null && sidecar.Error == null;
    private static string SavePath => Path.Combine(Application.persistentDataPath, "innkeeper.save");

    private void Start()
    {
        npc.OnToken += text => _answer += text;
        sidecar.OnReady += Show;
        sidecar.OnBudgetChanged += now => _vram = $"{now.UsedBytes >> 20} of {now.BudgetBytes >> 20} MiB";
    }

    private void Show(ModelInfo model)
    {
        _floorMb = model.FloorBytes / 1048576f;
        _fullMb = _askedMb = _budgetMb = model.FullBytes / 1048576f;
        _vram = model.Name;
    }

    private void OnGUI()
    {
        GUILayout.BeginArea(new Rect(20, 20, Screen.width - 40, Screen.height - 40));
        _question = GUILayout.TextField(_question);
        if (GUILayout.Button("Ask") && !_busy && IsReady) Ask(_question);
        if (GUILayout.Button("Save") && !_busy && IsReady)
            File.WriteAllBytes(SavePath, sidecar.Client.Save(npc.Conversation));
        if (GUILayout.Button("Load") && !_busy && IsReady && File.Exists(SavePath)) Load();
        GUILayout.Label(_answer);
        GUILayout.Label(sidecar.Error == null ? "VRAM: " + _vram : $"{sidecar.Error.Name}: {sidecar.Error.Message}");
        _budgetMb = GUILayout.HorizontalSlider(_budgetMb, _floorMb, _fullMb);
        GUILayout.EndArea();
    }

    private void Update()
    {
        if (IsReady && Math.Abs(_budgetMb - _askedMb) >= 1) Budget(_budgetMb);
    }

    private async void Ask(string question)
    {
        _answer = "";
        _busy = true;
        try
        {
            await npc.AskAsync(question);
        }
        catch (OperationCanceledException) // she is disabled, or npc.Cancel was called
        {
        }
        catch (FrameshardException error)
        {
            _answer = error.Message;
        }
        finally
        {
            _busy = false;
        }
    }

    private void Load()
    {
        try
        {
            sidecar.Client.Load(File.ReadAllBytes(SavePath), npc.Conversation);
            _answer = $"She remembers {sidecar.Client.History(npc.Conversation).Count} messages.";
        }
        catch (FrameshardException error) // the file is damaged
        {
            _answer = error.Message;
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
