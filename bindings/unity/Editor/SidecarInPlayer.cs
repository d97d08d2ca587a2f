using System.IO;
using UnityEditor;
using UnityEditor.Build;
using UnityEditor.Build.Reporting;
using UnityEngine;

namespace Frameshard.Unity.Editor
{
    /// <summary>Copies the sidecar into the player: the bundle in the project's directory `frameshard/windows` or
    /// `frameshard/linux`, which `frameshard bundle` has made. There, outside of Assets, Unity does not import its
    /// thousands of files.</summary>
    internal sealed class SidecarInPlayer : IPostprocessBuildWithReport
    {
        public int callbackOrder => 0;

        public void OnPostprocessBuild(BuildReport report)
        {
            var system = SystemOf(report.summary.platform);
            if (system == null) return;
            var bundle = Path.Combine("frameshard", system);
            if (!Directory.Exists(bundle))
            {
                Debug.LogWarning($"frameshard: the player has no sidecar, because there is no bundle in {bundle}");
                return;
            }
            var player = report.summary.outputPath;
            var data = Path.Combine(
                Path.GetDirectoryName(player) ?? "", Path.GetFileNameWithoutExtension(player) + "_Data");
            Replace(bundle, Path.Combine(data, "StreamingAssets", "frameshard"));
        }

        private static string SystemOf(BuildTarget target)
        {
            switch (target)
            {
                case BuildTarget.StandaloneWindows64: return "windows";
                case BuildTarget.StandaloneLinux64: return "linux";
                default: return null; // the sidecar does not run there
            }
        }

        /// <summary>Copies what is in a directory. What has the same name is removed before, so that nothing of an
        /// older bundle stays in it. All else stays, such as a model that the game has there.</summary>
        private static void Replace(string from, string to)
        {
            foreach (var entry in Directory.GetFileSystemEntries(from))
            {
                var old = Path.Combine(to, Path.GetFileName(entry));
                if (Directory.Exists(old)) Directory.Delete(old, true);
                else if (File.Exists(old)) File.Delete(old);
            }
            CopyTree(from, to);
        }

        private static void CopyTree(string from, string to)
        {
            Directory.CreateDirectory(to);
            foreach (var file in Directory.GetFiles(from))
                File.Copy(file, Path.Combine(to, Path.GetFileName(file))); // with its permission to be executed
            foreach (var directory in Directory.GetDirectories(from))
                CopyTree(directory, Path.Combine(to, Path.GetFileName(directory)));
        }
    }
}
