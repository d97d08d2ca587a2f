using System;
using System.Threading;
using System.Threading.Tasks;
using UnityEngine;

namespace Frameshard.Unity
{
    /// <summary>Owns the sidecar: one in a scene. It starts when enabled and ends when disabled or destroyed.</summary>
    [DisallowMultipleComponent]
    [AddComponentMenu("frameshard/Sidecar")]
    public sealed class FrameshardSidecar : MonoBehaviour
    {
        [SerializeField, Tooltip("Path of a GGUF file; a relative one begins in StreamingAssets")]
        private string model = "";
        [SerializeField, Tooltip("auto, cpu, emulated, or a name such as CUDA0")]
        private string device = "auto";
        [SerializeField, Min(0), Tooltip("All that the model may hold in VRAM, in MiB; 0: no limit")]
        private float vramBudgetMb = 2048;
        [SerializeField, Min(1), Tooltip("Tokens of context of each conversation")]
        private int nCtx = 4096;
        [SerializeField, Min(1), Tooltip("Conversations that are answered at a time")]
        private int nParallel = 4;
        [SerializeField, Tooltip("Python with frameshard installed; empty: python3")]
        private string python = "";
        [SerializeField, Min(1), Tooltip("Most events that are handled in one frame")]
        private int eventsPerFrame = 64;
        [SerializeField, Tooltip("How the GPU is shared with the game's frames")]
        private SchedulingMode scheduling = SchedulingMode.Balance;
        [SerializeField, Min(0), Tooltip("Frames a second that the game keeps; 0: the model takes no notice of them")]
        private float targetFrameRate = 60;

        private readonly FrameTiming[] _timings = new FrameTiming[1];
        private FrameBlock _frames;

        public event Action<ModelInfo> OnReady;
        public event Action<BudgetResult> OnBudgetChanged;
        public event Action<Notice> OnNotice;
        public event Action<FrameshardException> OnError;

        /// <summary>The session; null while disabled.</summary>
        public Sidecar Client { get; private set; }

        /// <summary>Why there is no sidecar: it could not be started, or it has ended. Null while all is well.</summary>
        public FrameshardException Error { get; private set; }

        /// <summary>All that the sidecar holds in VRAM has to fit into so many MiB; 0 is no limit.</summary>
        public Task<BudgetResult> SetBudgetAsync(float mb, CancellationToken cancellation = default(CancellationToken))
        {
            if (Client == null) throw new InvalidOperationException("FrameshardSidecar is not enabled");
            return Client.SetBudgetAsync(mb, cancellation: cancellation);
        }

        private void OnEnable()
        {
            Error = null;
            try
            {
                Client = Sidecar.Launch(new LaunchOptions
                {
                    Model = System.IO.Path.Combine(Application.streamingAssetsPath, model),
                    Device = device, VramBudgetMb = vramBudgetMb, NCtx = (uint)nCtx, NParallel = (uint)nParallel,
                    Python = python.Length > 0 ? python : null, ClientName = "unity",
                });
            }
            catch (FrameshardException error)
            {
                End(error);
                return;
            }
            Client.OnBudgetChanged += result => OnBudgetChanged?.Invoke(result);
            Client.OnNotice += notice => OnNotice?.Invoke(notice);
            Client.OnRefused += Report;
            Client.OnClosed += End;
            Greet(Client);
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
                if (!client.IsClosed) throw; // else OnClosed says why
            }
        }

        private void Update()
        {
            TellFrame();
            Client?.Poll(eventsPerFrame);
        }

        private void TellFrame()
        {
            if (_frames == null) return;
            FrameTimingManager.CaptureFrameTimings();
            if (FrameTimingManager.GetLatestTimings(1, _timings) > 0 && _timings[0].gpuFrameTime > 0)
                _frames.End(_timings[0].gpuFrameTime / 1000);
            _frames.Begin();
        }

        // Alt-tab: nothing that matters is drawn, and the model may use all of the GPU.
        private void OnApplicationFocus(bool focused)
        {
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
            if (error.Code != 0) Report(error); // else it was shut down
        }

        private void Report(FrameshardException error)
        {
            Debug.LogError($"frameshard: {error.Name}: {error.Message}", this);
            OnError?.Invoke(error);
        }
    }
}
