using System;
using System.IO;
using System.Reflection;
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
        Field("model").SetValue(Component, arguments[0]);
        Field("python").SetValue(Component, arguments[1]);
        Field("device").SetValue(Component, "emulated");
        Call("OnEnable");
        while (Field("_frames").GetValue(Component) == null)
        {
            Call("Update");
            Thread.Sleep(5);
        }
        _path = Component.Client.Run(Component.Client.GetFrameBlockAsync());
        Play();
        Call("OnApplicationFocus", false);
        Play();
        Call("OnApplicationFocus", true);
        Play();
        Call("OnDisable");
    }

    private static void Play()
    {
        Call("Update");
        Call("Update");
        using (var file = new FileStream(_path, FileMode.Open, FileAccess.Read, FileShare.ReadWrite))
        using (var reader = new BinaryReader(file))
        {
            file.Position = 12;
            Console.WriteLine(reader.ReadUInt32());
        }
    }

    // Unity finds these by their names, too.
    private static void Call(string name, params object[] arguments) =>
        typeof(FrameshardSidecar).GetMethod(name, BindingFlags.Instance | BindingFlags.NonPublic)
            .Invoke(Component, arguments);

    private static FieldInfo Field(string name) =>
        typeof(FrameshardSidecar).GetField(name, BindingFlags.Instance | BindingFlags.NonPublic);
}
