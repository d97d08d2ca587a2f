using System;
using System.Threading;
using System.Threading.Tasks;
using UnityEngine;

namespace Frameshard.Unity
{
    /// <summary>Owns the sidecar. Use one in a scene. The sidecar starts when this component is enabled and ends when
    /// it is disabled or destroyed.</summary>
    [DisallowMultipleComponent]
    [AddComponentMenu("frameshard/Sidecar")]
    public sealed class FrameshardSidecar : MonoBehaviour
    {
        [SerializeField, Tooltip("Path of the model, a GGUF file. A relative path starts in StreamingAssets.")]
        private string model = "";
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
        [SerializeField, Min(1), Tooltip("Most events that are handled in one frame.")]
        private int eventsPerFrame = 64;
        [SerializeField, Tooltip("How the model shares the GPU with the game's frames.")]
        private SchedulingMode scheduling = SchedulingMode.Balance;
        [SerializeField, Min(0), Tooltip("Frame rate that the model leaves GPU time for. 0: it ignores frames.")]
        private float targetFrameRate = 60;

        private readonly FrameTiming[] _timings = new FrameTiming[1];
        private FrameBlock _frames;
        private bool _focused;

        public event Action<ModelInfo> OnReady;
        public event Action<BudgetResult> OnBudgetChanged;
        public event Action<Notice> OnNotice;
        public event Action<Loading> OnLoading;
        public event Action<FrameshardException> OnError;

        /// <summary>The session with the sidecar; null while disabled.</summary>
        public Sidecar Client { get; private set; }

        /// <summary>Why the sidecar could not be started or has ended; null if neither has happened.</summary>
        public FrameshardException Error { get; private set; }

        /// <summary>Limits all VRAM that the sidecar uses to <paramref name="mb"/> MiB; 0: no limit. The task ends
        /// when the VRAM above the limit is released.</summary>
        /// <exception cref="InvalidOperationException">This component is not enabled.</exception>
        public Task<BudgetResult> SetBudgetAsync(float mb, CancellationToken cancellation = default(CancellationToken))
        {
            if (Client == null) throw new InvalidOperationException("FrameshardSidecar is not enabled");
            return Client.SetBudgetAsync(mb, cancellation: cancellation);
        }

        private void OnEnable()
        {
            Error = null;
            _focused = Application.isFocused;
            try
            {
                Client = Sidecar.Launch(new LaunchOptions
                {
                    Model = System.IO.Path.Combine(Application.streamingAssetsPath, model),
                    Device = device, VramBudgetMb = vramBudgetMb, NCtx = (uint)nCtx, NParallel = (uint)nParallel,
                    Python = python.Length > 0 ? python : BuiltIn(Application.streamingAssetsPath),
                    ClientName = "unity",
                });
            }
            catch (FrameshardException error)
            {
                End(error);
                return;
            }
            Client.OnBudgetChanged += result => OnBudgetChanged?.Invoke(result);
            Client.OnNotice += notice => OnNotice?.Invoke(notice);
            Client.OnLoading += loading => OnLoading?.Invoke(loading);
            Client.OnRefused += Report;
            Client.OnClosed += End;
            Greet(Client);
        }

        /// <summary>The sidecar that `SidecarInPlayer` has copied into the player; null if there is none.</summary>
        private static string BuiltIn(string assets)
        {
            var directory = System.IO.Path.Combine(assets, "frameshard", "sidecar");
            foreach (var name in new[] { "pythonw.exe", "python" })
            {
                var path = System.IO.Path.Combine(directory, name);
                if (System.IO.File.Exists(path)) return path;
            }
            return null;
        }

        private async void Greet(Sidecar client)
        {
            try
            {
                OnReady?.Invoke(await client.Ready);
                client.SetPacing(scheduling);
                if (targetFrameRate <= 0) return;
                var path = await client.GetFrameBlockAsync();
                if (client == Client) _frames = FrameBlock.Open(path, 1 / targetFrameRate);
            }
            catch (FrameshardException)
            {
                if (!client.IsClosed) throw; // if it is closed, OnClosed reports the reason
            }
        }

        private void Update()
        {
            TellFrame();
            Client?.Poll(eventsPerFrame);
        }

        private void TellFrame()
        {
            if (_frames == null || !_focused) return; // Begin would clear the idle flag
            FrameTimingManager.CaptureFrameTimings();
            if (FrameTimingManager.GetLatestTimings(1, _timings) > 0 && _timings[0].gpuFrameTime > 0)
                _frames.End(_timings[0].gpuFrameTime / 1000);
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
