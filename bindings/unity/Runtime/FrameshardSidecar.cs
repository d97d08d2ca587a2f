using System;
using System.IO;
using System.Threading;
using System.Threading.Tasks;
using UnityEngine;

namespace Frameshard.Unity
{
    /// <summary>Owns the sidecar. Use one in a scene. The sidecar starts when this component is enabled and ends when
    /// it is disabled or destroyed; disabling waits up to 1 s for its end. Events are raised in Update, so handlers
    /// that are added in Start miss none.</summary>
    [DisallowMultipleComponent]
    [AddComponentMenu("frameshard/Sidecar")]
    public sealed class FrameshardSidecar : MonoBehaviour
    {
        private const float MinFrameRate = 0.1f; // of a frame block
        private const double MaxGpuSeconds = 10;

        [SerializeField, Tooltip("Path of the model, a GGUF file. A relative path starts in StreamingAssets.")]
        private string model = "";
        [SerializeField, Tooltip("Path of the model's vision tower, a GGUF file, for images. A relative path starts in "
            + "StreamingAssets. Empty: none.")]
        private string mmproj = "";
        [SerializeField, Tooltip("Path of a sentence encoder, a GGUF file, for EmbedAsync. A relative path starts in "
            + "StreamingAssets. Empty: none.")]
        private string embedder = "";
        [SerializeField, Tooltip("Device that runs the model: auto, cpu, emulated, or a name such as CUDA0.")]
        private string device = "auto";
        [SerializeField, Min(0), Tooltip("Limit on all VRAM that the model uses, in MiB. 0: no limit.")]
        private float vramBudgetMb = 2048;
        [SerializeField, Min(1), Tooltip("Most tokens of each conversation, prompt and answers together.")]
        private int nCtx = 4096;
        [SerializeField, Min(1), Tooltip("Number of answers that the model generates at the same time.")]
        private int nParallel = 4;
        [SerializeField, Tooltip("Path of a Python that has frameshard installed. Empty: the sidecar that was built "
            + "into the player; in the editor, and without one, python3.")]
        private string python = "";
        [SerializeField, Tooltip("Path of a file to which the sidecar appends its log. A relative path starts in the "
            + "persistent data path. Empty: the log goes to standard error.")]
        private string logFile = "";
        [SerializeField, TextArea, Tooltip("A JSON object with further launch options, such as "
            + "{\"kv_type\": \"q8_0\"}; they take precedence. Empty: none.")]
        private string extraJson = "";
        [SerializeField, Min(1), Tooltip("Most events that are handled in one frame.")]
        private int eventsPerFrame = 64;
        [SerializeField, Tooltip("How the model shares the GPU with the game's frames.")]
        private SchedulingMode scheduling = SchedulingMode.Balance;
        [SerializeField, Min(0), Tooltip("Frame rate that the model leaves GPU time for, at least 0.1. 0: it ignores "
            + "frames.")]
        private float targetFrameRate = 60;

        private readonly FrameTiming[] _timings = new FrameTiming[1];
        private FrameBlock _frames;
        private bool _focused;
        private FrameshardException _launchError; // until OnError is raised

        /// <summary>Raised when the model is loaded and the frame block, if there is one, is open.</summary>
        public event Action<ModelInfo> OnReady;
        public event Action<BudgetResult> OnBudgetChanged;
        public event Action<Notice> OnNotice;
        public event Action<Loading> OnLoading;
        /// <summary>Raised when the sidecar could not be started, has ended, or has refused a request without a
        /// task.</summary>
        public event Action<FrameshardException> OnError;

        /// <summary>The session with the sidecar; null while disabled.</summary>
        public Sidecar Client { get; private set; }

        /// <summary>Why the sidecar could not be started or has ended; null if neither has happened.</summary>
        public FrameshardException Error { get; private set; }

        /// <summary>Limits all VRAM that the sidecar uses to <paramref name="mb"/> MiB; 0: no limit. The task ends
        /// when the VRAM above the limit is released.</summary>
        /// <exception cref="FrameshardException">The sidecar could not be started, or has ended.</exception>
        /// <exception cref="InvalidOperationException">This component is not enabled.</exception>
        public Task<BudgetResult> SetBudgetAsync(float mb, CancellationToken cancellation = default(CancellationToken))
        {
            if (Client == null && Error != null) throw Error;
            if (Client == null) throw new InvalidOperationException("FrameshardSidecar is not enabled");
            return Client.SetBudgetAsync(mb, cancellation: cancellation);
        }

        private void OnEnable()
        {
            Error = null;
            _focused = Application.isFocused;
            try
            {
                Client = Sidecar.Launch(MakeOptions());
            }
            catch (FrameshardException error)
            {
                Error = _launchError = error; // Update reports it, when other objects have added their handlers
                return;
            }
            Client.OnBudgetChanged += result => OnBudgetChanged?.Invoke(result);
            Client.OnNotice += notice => OnNotice?.Invoke(notice);
            Client.OnLoading += loading => OnLoading?.Invoke(loading);
            Client.OnRefused += Report;
            Client.OnClosed += End;
            Greet(Client);
        }

        private LaunchOptions MakeOptions()
        {
            return new LaunchOptions
            {
                Model = Path.Combine(Application.streamingAssetsPath, model),
                Mmproj = Find(Application.streamingAssetsPath, mmproj),
                Embedder = Find(Application.streamingAssetsPath, embedder),
                LogFile = Find(Application.persistentDataPath, logFile),
                Device = device, VramBudgetMb = vramBudgetMb, NCtx = (uint)nCtx, NParallel = (uint)nParallel,
                Python = python.Length > 0 ? python : BuiltIn(Application.streamingAssetsPath),
                ExtraJson = extraJson.Length > 0 ? extraJson : null, Loading = "on", ClientName = "unity",
            };
        }

        private static string Find(string directory, string path)
        {
            return path.Length > 0 ? Path.Combine(directory, path) : null;
        }

        /// <summary>The sidecar that `SidecarInPlayer` has copied into the player; null if there is none.</summary>
        private static string BuiltIn(string assets)
        {
            var directory = Path.Combine(assets, "frameshard", "sidecar");
            foreach (var name in new[] { "pythonw.exe", "python" })
            {
                var path = Path.Combine(directory, name);
                if (File.Exists(path)) return path;
            }
            return null;
        }

        private async void Greet(Sidecar client)
        {
            ModelInfo loaded;
            try
            {
                loaded = await client.Ready;
            }
            catch (FrameshardException)
            {
                return; // OnClosed reports the reason
            }
            try
            {
                client.SetPacing(scheduling);
                if (targetFrameRate > 0)
                {
                    var path = await client.GetFrameBlockAsync();
                    if (client != Client) return;
                    _frames = FrameBlock.Open(path, 1.0 / Math.Max(targetFrameRate, MinFrameRate));
                }
            }
            catch (FrameshardException error)
            {
                if (client.IsClosed) return; // OnClosed reports the reason
                Report(error); // the model answers without pacing, too
            }
            OnReady?.Invoke(loaded); // last: an exception of a handler stops nothing of the above
        }

        private void Update()
        {
            if (_launchError != null)
            {
                var error = _launchError;
                _launchError = null;
                Report(error);
            }
            Client?.Poll(eventsPerFrame);
            TellFrame();
        }

        private void TellFrame()
        {
            if (_frames == null || !_focused) return; // Begin would clear the idle flag
            FrameTimingManager.CaptureFrameTimings();
            if (FrameTimingManager.GetLatestTimings(1, _timings) > 0)
            {
                var gpuSeconds = _timings[0].gpuFrameTime / 1000;
                // A longer time is no frame's, such as that of a pause; the frame block refuses it.
                if (gpuSeconds > 0 && gpuSeconds <= MaxGpuSeconds) _frames.End(gpuSeconds);
            }
            _frames.Begin();
        }

        // While the game is in the background, the model may use the whole GPU.
        private void OnApplicationFocus(bool focused)
        {
            _focused = focused;
            if (!focused) _frames?.Idle();
        }

        private void OnDisable()
        {
            _frames?.Dispose();
            _frames = null;
            Client?.Dispose();
            Client = null;
            _launchError = null;
        }

        private void End(FrameshardException error)
        {
            Error = error;
            if (error.Code != 0) Report(error); // 0: Shutdown was called
        }

        private void Report(FrameshardException error)
        {
            Debug.LogError($"frameshard: {error.Name}: {error.Message}", this);
            OnError?.Invoke(error);
        }
    }
}
