using System;
using System.IO;
using UnityEditor;
using UnityEngine;

namespace Frameshard.Unity.Editor
{
    /// <summary>Downloads a model into StreamingAssets, where `FrameshardSidecar` looks for it.</summary>
    internal sealed class ModelWindow : EditorWindow
    {
        private const float MiB = 1048576f;

        private string _url = "", _sha256 = "", _state = "";
        private Download _download;

        [MenuItem("Tools/frameshard/Download a model")]
        private static void Open() => GetWindow<ModelWindow>("frameshard model");

        private void OnGUI()
        {
            _url = EditorGUILayout.TextField("Address of a GGUF file", _url);
            _sha256 = EditorGUILayout.TextField("SHA-256, if known", _sha256);
            if (_download == null)
            {
                if (GUILayout.Button("Download") && _url.Length > 0) Begin();
            }
            else if (GUILayout.Button("Cancel"))
            {
                _download.Cancel();
            }
            GUILayout.Label(_state);
        }

        private void Begin()
        {
            try
            {
                var path = Path.Combine(Application.streamingAssetsPath, Download.NameOf(_url));
                _download = new Download(_url, path, _sha256);
            }
            catch (ArgumentException error)
            {
                _state = error.Message;
            }
        }

        private void Update()
        {
            if (_download == null) return;
            _state = $"{_download.DoneBytes / MiB:F0} of {_download.TotalBytes / MiB:F0} MiB";
            if (_download.IsOver)
            {
                _state = _download.Error ?? "The model is in StreamingAssets.";
                _download = null;
                AssetDatabase.Refresh();
            }
            Repaint();
        }

        private void OnDestroy() => _download?.Cancel();
    }
}
