// Runs what the editor scripts of the Unity package do without Unity: a download, the name of its file, or the step
// after a build.

using System;
using System.Threading;
using Frameshard.Unity.Editor;
using UnityEditor;
using UnityEditor.Build.Reporting;

internal static class EditorTools
{
    private static void Main(string[] args)
    {
        if (args[0] == "build")
        {
            var target = (BuildTarget)Enum.Parse(typeof(BuildTarget), args[1]);
            var summary = new BuildSummary { platform = target, outputPath = args[2] };
            new SidecarInPlayer().OnPostprocessBuild(new BuildReport { summary = summary });
            return;
        }
        if (args[0] == "name")
        {
            try
            {
                Console.WriteLine(Download.NameOf(args[1]));
            }
            catch (ArgumentException error)
            {
                Console.WriteLine(error.Message);
            }
            return;
        }
        var download = new Download(args[1], args[2], args[3]);
        var cancelAt = long.Parse(args[4]);
        while (!download.IsOver)
        {
            if (download.DoneBytes >= cancelAt) download.Cancel();
            Thread.Sleep(1);
        }
        Console.WriteLine($"{download.DoneBytes} {download.TotalBytes} {download.Error}");
        Environment.Exit(0); // Mono does not end by itself after an aborted request
    }
}
