using System;
using System.IO;
using System.Threading;
using Frameshard;
using Frameshard.Unity;

/// <summary>Focus MODEL PYTHON: plays frames of the Unity component, with and without the focus, and prints the flag of
/// its frame block that lets the model use the whole GPU.</summary>
internal static class Focus
{
    private static readonly FrameshardSidecar Component = new FrameshardSidecar();
    private static string _path;

    private static void Main(string[] arguments)
    {
        Component.Set("model", arguments[0]).Set("python", arguments[1]).Set("device", "emulated");
        Component.Call("OnEnable");
        while (Component.Get("_frames") == null)
        {
            Component.Call("Update");
            Thread.Sleep(5);
        }
        _path = Component.Client.Run(Component.Client.GetFrameBlockAsync());
        Play();
        Component.Call("OnApplicationFocus", false);
        Play();
        Component.Call("OnApplicationFocus", true);
        Play();
        Component.Call("OnDisable");
    }

    private static void Play()
    {
        Component.Call("Update");
        Component.Call("Update");
        using (var file = new FileStream(_path, FileMode.Open, FileAccess.Read, FileShare.ReadWrite))
        using (var reader = new BinaryReader(file))
        {
            file.Position = 12;
            Console.WriteLine(reader.ReadUInt32());
        }
    }
}
