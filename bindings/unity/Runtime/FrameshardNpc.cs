using System;
using System.Collections.Generic;
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

        private readonly List<Job> _open = new List<Job>();

        public event Action<string> OnToken;
        /// <summary>A whole sentence, for text to speech.</summary>
        public event Action<string> OnSentence;
        public event Action<string> OnResponse;
        public event Action<Exception> OnError;

        /// <summary>Name of the conversation, for <see cref="Sidecar.Save"/>, <see cref="Sidecar.Load"/> and
        /// <see cref="Sidecar.History"/>. Characters with the same name share one conversation, so give each instance
        /// of a prefab a name of its own. Setting it holds for later questions; null or "": the name of this
        /// object.</summary>
        public string Conversation
        {
            get => conversation.Length > 0 ? conversation : name;
            set => conversation = value ?? "";
        }

        /// <summary>Asks the character. The task ends with the whole answer, with a
        /// <see cref="FrameshardException"/>, or as cancelled: by the token, by <see cref="Cancel"/>, or when this
        /// component is disabled. Then awaiting it throws an <see cref="OperationCanceledException"/>.</summary>
        /// <exception cref="InvalidOperationException">There is no enabled FrameshardSidecar.</exception>
        public async Task<string> AskAsync(string text, CancellationToken cancellation = default(CancellationToken))
        {
            if (sidecar == null || (sidecar.Client == null && sidecar.Error == null))
                throw new InvalidOperationException("FrameshardNpc needs an enabled FrameshardSidecar");
            try
            {
                if (sidecar.Client == null) throw sidecar.Error;
                cancellation.ThrowIfCancellationRequested();
                var job = sidecar.Client.Ask(text, new JobOptions
                {
                    Conversation = Conversation,
                    System = persona.Length > 0 ? persona : null, // "" would erase the system text of a save
                    Sampling = new Sampling { MaxTokens = maxTokens, Temperature = temperature },
                    Sentences = OnSentence != null,
                }, delta => OnToken?.Invoke(delta), cancellation);
                job.OnSentence += sentence => OnSentence?.Invoke(sentence);
                var answer = await Finished(job);
                OnResponse?.Invoke(answer.Text);
                return answer.Text;
            }
            catch (FrameshardException error)
            {
                OnError?.Invoke(error);
                throw;
            }
        }

        private async Task<Completion> Finished(Job job)
        {
            _open.Add(job);
            try
            {
                return await job.Completion;
            }
            finally
            {
                _open.Remove(job);
            }
        }

        /// <summary>Cancels all questions that are not answered yet.</summary>
        public void Cancel()
        {
            foreach (var job in _open) job.Cancel();
        }

        private void OnDisable() => Cancel();
    }
}
