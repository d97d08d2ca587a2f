using UnityEditor;

namespace Frameshard.Unity.Editor
{
    /// <summary>The editor's process outlives Play mode and reloads of code; no sidecar does.</summary>
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
