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
        [SerializeField, Min(1), Tooltip("Tokens of context, shared by all conversations")]
        private int nCtx = 4096;
        [SerializeField, Min(1), Tooltip("Conversations that are answered at a time")]
        private int nParallel = 4;
        [SerializeField, Tooltip("Python with frameshard installed; empty: python3")]
        private string python = "";
        [SerializeField, Min(1), Tooltip("Most events that are handled in one frame")]
        private int eventsPerFrame = 64;

        public event Action<ModelInfo> OnReady;
        public event Action<BudgetResult> OnBudgetChanged;
        public event Action<FrameshardException> OnError;

        /// <summary>The session; null while disabled.</summary>
        public Sidecar Client { get; private set; }

        /// <summary>All that the sidecar holds in VRAM has to fit into so many MiB; 0 is no limit.</summary>
        public Task<BudgetResult> SetBudgetAsync(float mb, CancellationToken cancellation = default(CancellationToken))
        {
            if (Client == null) throw new InvalidOperationException("FrameshardSidecar is not enabled");
            return Client.SetBudgetAsync(mb, cancellation: cancellation);
        }

        private void OnEnable()
        {
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
                Report(error);
                return;
            }
            Client.OnBudgetChanged += result => OnBudgetChanged?.Invoke(result);
            Client.OnClosed += Report;
            Greet(Client);
        }

        private async void Greet(Sidecar client)
        {
            try
            {
                OnReady?.Invoke(await client.Ready);
            }
            catch (FrameshardException)
            {
                // OnClosed says why
            }
        }

        private void Update() => Client?.Poll(eventsPerFrame);

        private void OnDisable()
        {
            Client?.Dispose();
            Client = null;
        }

        private void Report(FrameshardException error)
        {
            Debug.LogError($"frameshard: {error.Name}: {error.Message}", this);
            OnError?.Invoke(error);
        }
    }
}
