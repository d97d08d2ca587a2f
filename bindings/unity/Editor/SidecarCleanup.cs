using UnityEditor;

namespace Frameshard.Unity.Editor
{
    /// <summary>Ends all sidecars when Play mode ends, when code is reloaded and when the editor quits, because the
    /// editor's process goes on.</summary>
    [InitializeOnLoad]
    internal static class SidecarCleanup
    {
        static SidecarCleanup()
        {
            AssemblyReloadEvents.beforeAssemblyReload += Sidecar.CloseAll;
            EditorApplication.quitting += Sidecar.CloseAll;
            EditorApplication.playModeStateChanged += change =>
            {
                if (change == PlayModeStateChange.EnteredEditMode) Sidecar.CloseAll();
            };
        }
    }
}
