// The little of Unity's editor that bindings/unity uses.

using System;

namespace UnityEditor
{
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
