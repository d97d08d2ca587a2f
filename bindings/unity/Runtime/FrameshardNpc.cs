using System;
using System.Threading;
using System.Threading.Tasks;
using UnityEngine;

namespace Frameshard.Unity
{
    /// <summary>A character with its own persona and its own conversation.</summary>
    [AddComponentMenu("frameshard/NPC")]
    public sealed class FrameshardNpc : MonoBehaviour
    {
        [SerializeField] private FrameshardSidecar sidecar;
        [SerializeField, TextArea] private string persona = "";
        [SerializeField, Tooltip("Name of the conversation. Empty: the name of this object.")]
        private string conversation = "";
        [SerializeField, Min(1)] private int maxTokens = 256;
        [SerializeField, Range(0, 5)] private float temperature = 0.8f;

        private Job _job;

        public event Action<string> OnToken;
        /// <summary>A whole sentence, for text to speech.</summary>
        public event Action<string> OnSentence;
        public event Action<string> OnResponse;
        public event Action<Exception> OnError;

        /// <summary>Name of the conversation, for <see cref="Sidecar.Save"/>, <see cref="Sidecar.Load"/> and
        /// <see cref="Sidecar.History"/>.</summary>
        public string Conversation => conversation.Length > 0 ? conversation : name;

        /// <summary>Asks the character. The task ends with the whole answer, or with a
        /// <see cref="FrameshardException"/>.</summary>
        /// <exception cref="InvalidOperationException">There is no enabled FrameshardSidecar.</exception>
        public async Task<string> AskAsync(string text, CancellationToken cancellation = default(CancellationToken))
        {
            if (sidecar == null || (sidecar.Client == null && sidecar.Error == null))
                throw new InvalidOperationException("FrameshardNpc needs an enabled FrameshardSidecar");
            try
            {
                if (sidecar.Client == null) throw sidecar.Error;
                cancellation.ThrowIfCancellationRequested();
                _job = sidecar.Client.Ask(text, new JobOptions
                {
                    Conversation = Conversation, System = persona,
                    Sampling = new Sampling { MaxTokens = maxTokens, Temperature = temperature },
                    Sentences = OnSentence != null,
                }, delta => OnToken?.Invoke(delta), cancellation);
                _job.OnSentence += sentence => OnSentence?.Invoke(sentence);
                var answer = await _job.Completion;
                OnResponse?.Invoke(answer.Text);
                return answer.Text;
            }
            catch (FrameshardException error)
            {
                OnError?.Invoke(error);
                throw;
            }
        }

        /// <summary>Ends the current answer early.</summary>
        public void Cancel() => _job?.Cancel();

        private void OnDisable() => Cancel();
    }
}
