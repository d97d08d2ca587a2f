using System;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using Frameshard;
using Frameshard.Unity;
using UnityEngine;

/// <summary>Scene MODEL PYTHON: plays a scene with the components and both samples as Unity does: every OnEnable, every
/// Start, then frames. Prints what the objects of the scene have heard.</summary>
internal static class Scene
{
    private static readonly FrameshardSidecar Sidecar = new FrameshardSidecar();
    private static readonly FrameshardNpc Npc = new FrameshardNpc { name = "Mira" };
    private static readonly Innkeeper Innkeeper = new Innkeeper();
    private static readonly Tavern Tavern = new Tavern();

    private static void Main(string[] arguments)
    {
        Sidecar.Set("model", arguments[0]).Set("python", arguments[1]).Set("device", "emulated").Set("nCtx", 1024);
        Sidecar.Set("targetFrameRate", 0.01f);
        Npc.Sidecar = Sidecar; // as a game does for an instance of a prefab
        Npc.Persona = "You are Mira.";
        Innkeeper.Set("sidecar", Sidecar).Set("npc", Npc);
        Tavern.Set("sidecar", Sidecar).Set("npc", Npc);
        Sidecar.Call("OnEnable");
        Innkeeper.Call("Start");
        Tavern.Call("Start");
        if (Sidecar.Error != null) Fail();
        else Play();
        Sidecar.Call("OnDisable");
        Environment.Exit(0);
    }

    private static void Fail()
    {
        FrameshardException heard = null;
        Sidecar.OnError += error => heard = error;
        Sidecar.Call("Update");
        GUILayout.first = null;
        Tavern.Call("OnGUI");
        var told = 0;
        Task retry = null;
        Npc.OnError += error =>
        {
            told++;
            retry = Npc.AskAsync("Perhaps now?"); // would be an endless recursion
        };
        var asked = Npc.AskAsync("Any rooms left?").Exception.InnerException;
        var once = told == 1 && retry.IsFaulted;
        try
        {
            Sidecar.SetBudgetAsync(1024);
        }
        catch (FrameshardException error)
        {
            once = once && error == Sidecar.Error;
        }
        Console.WriteLine($"{heard.Name} {heard == Sidecar.Error} {heard == asked && once} {GUILayout.first}");
    }

    private static void Play()
    {
        var loaded = 0;
        object frames = null;
        Sidecar.OnLoading += loading => loaded++;
        Sidecar.OnReady += model => frames = Sidecar.Get("_frames");
        FrameTimingManager.gpuFrameTime = 20000; // ms; a driver may report this after a pause
        PlayUntil(() => frames != null);
        Console.WriteLine($"ready: {IsReady(Innkeeper)} {IsReady(Tavern)}, loading told: {loaded > 0}");
        AskAndLeave();
        LeaveInMidAnswer();
        KeepTheTextOfASave();
    }

    private static void AskAndLeave()
    {
        var answers = new[] { "One.", "Two." }.Select(text => Npc.AskAsync(text)).ToArray();
        Innkeeper.Call("Ask", "Three.");
        Npc.Call("OnDisable");
        PlayUntil(() => answers.All(answer => answer.IsCompleted) && !(bool)Innkeeper.Get("_busy"));
        Console.WriteLine(string.Join(" ", answers.Select(answer => answer.Status.ToString())));
    }

    private static void LeaveInMidAnswer()
    {
        var heard = 0;
        Npc.OnToken += text => heard++;
        Npc.OnResponse += text => heard++;
        var answer = Npc.AskAsync("Tell me a long story.");
        Sidecar.Set("eventsPerFrame", 1);
        PlayUntil(() => heard > 0);
        Sidecar.Client.Wait(60); // until the next part of the answer is there
        Npc.Call("OnDisable");
        heard = 0;
        PlayUntil(() => answer.IsCompleted);
        Console.WriteLine($"heard after the end: {heard}");
    }

    private static void KeepTheTextOfASave()
    {
        Npc.Conversation = "the second Mira";
        Npc.Set("persona", "").Set("maxTokens", 4);
        Sidecar.Client.Load(Sidecar.Client.Save("Mira"), Npc.Conversation);
        var answer = Npc.AskAsync("Any rooms left?");
        PlayUntil(() => answer.IsCompleted);
        Console.WriteLine($"{answer.Status}: {Sidecar.Client.History(Npc.Conversation)[0].Content}");
    }

    private static void PlayUntil(Func<bool> condition)
    {
        while (!condition())
        {
            Sidecar.Call("Update");
            Thread.Sleep(5);
        }
    }

    private static object IsReady(object sample) => sample.Call("get_IsReady");
}
