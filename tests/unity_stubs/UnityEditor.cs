// The little of Unity's editor that bindings/unity uses.

using System;
using UnityEditor.Build.Reporting;

namespace UnityEditor
{
    public enum BuildTarget { StandaloneOSX = 2, StandaloneWindows64 = 19, StandaloneLinux64 = 24 }

    public sealed class MenuItem : Attribute { public MenuItem(string itemName) { } }

    public class EditorWindow : UnityEngine.Object
    {
        public static T GetWindow<T>(string title) where T : EditorWindow => null;
        public void Repaint() { }
    }

    public static class EditorGUILayout
    {
        public static string TextField(string label, string text) => text;
    }

    public static class AssetDatabase
    {
        public static void Refresh() { }
    }

    public enum PlayModeStateChange { EnteredEditMode, ExitingEditMode, EnteredPlayMode, ExitingPlayMode }

    public sealed class InitializeOnLoadAttribute : Attribute { }

    public static class AssemblyReloadEvents
    {
        public delegate void AssemblyReloadCallback();
        public static event AssemblyReloadCallback beforeAssemblyReload { add { } remove { } }
    }

    public static class EditorApplication
    {
        public static event Action quitting { add { } remove { } }
        public static event Action<PlayModeStateChange> playModeStateChanged { add { } remove { } }
    }
}

namespace UnityEditor.Build
{
    public interface IPostprocessBuildWithReport
    {
        int callbackOrder { get; }
        void OnPostprocessBuild(BuildReport report);
    }
}

namespace UnityEditor.Build.Reporting
{
    public struct BuildSummary
    {
        public BuildTarget platform { get; set; }
        public string outputPath { get; set; }
    }

    public sealed class BuildReport
    {
        public BuildSummary summary { get; set; }
    }
}
