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
        private bool _telling; // of an error
        private int _stopped; // number of calls of Cancel: what was asked before the last one raises no event

        public event Action<string> OnToken;
        /// <summary>A whole sentence, for text to speech.</summary>
        public event Action<string> OnSentence;
        public event Action<string> OnResponse;
        /// <summary>Why a question has no answer. A question that a handler asks and that fails at once only ends its
        /// task.</summary>
        public event Action<Exception> OnError;

        /// <summary>The sidecar that answers. Set it for instances of a prefab and for the characters of later scenes:
        /// neither can refer to an object of another scene. It holds for later questions.</summary>
        public FrameshardSidecar Sidecar
        {
            get => sidecar;
            set => sidecar = value;
        }

        /// <summary>The system text of the conversation. Setting it holds for later questions. null or "": that of the
        /// conversation stays.</summary>
        public string Persona
        {
            get => persona;
            set => persona = value ?? "";
        }

        /// <summary>Name of the conversation, for <see cref="Frameshard.Sidecar.Save"/>,
        /// <see cref="Frameshard.Sidecar.Load"/> and <see cref="Frameshard.Sidecar.History"/>. Characters with the same
        /// name share one conversation, so give each instance of a prefab a name of its own. Setting it holds for later
        /// questions; null or "": the name of this object.</summary>
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
            var before = _stopped;
            Func<bool> isHeard = () => _stopped == before;
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
                }, delta => { if (isHeard()) OnToken?.Invoke(delta); }, cancellation);
                job.OnSentence += sentence => { if (isHeard()) OnSentence?.Invoke(sentence); };
                var answer = await Finished(job);
                if (isHeard()) OnResponse?.Invoke(answer.Text);
                return answer.Text;
            }
            catch (FrameshardException error)
            {
                if (isHeard()) Tell(error);
                throw;
            }
        }

        /// <summary>A handler may ask again: if that fails at once, its task says so, and the handler does not call
        /// itself.</summary>
        private void Tell(FrameshardException error)
        {
            if (_telling) return;
            _telling = true;
            try
            {
                OnError?.Invoke(error);
            }
            finally
            {
                _telling = false;
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

        /// <summary>Cancels all questions that are not answered yet. No event is raised for them any more.</summary>
        public void Cancel()
        {
            _stopped++;
            foreach (var job in _open) job.Cancel();
        }

        private void OnDisable() => Cancel();
    }
}
