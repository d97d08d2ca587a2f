using System;
using System.Collections.Generic;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace Frameshard
{
    /// <summary>A job: one question and its answer. It changes only inside <see cref="Sidecar.Poll"/>.</summary>
    public sealed class Job
    {
        private readonly StringBuilder _text = new StringBuilder();
        private readonly StringBuilder _thought = new StringBuilder();
        private readonly List<ToolCall> _calls = new List<ToolCall>();
        private int _spoken; // of the text, up to the end of the last sentence
        private readonly TaskCompletionSource<Completion> _end = new TaskCompletionSource<Completion>();
        internal CancellationTokenRegistration Registration;

        internal Job(Sidecar sidecar, ulong timeline, Action<string> onToken)
        {
            Sidecar = sidecar;
            Timeline = timeline;
            OnToken += onToken;
        }

        public Sidecar Sidecar { get; }

        public ulong Id { get; internal set; }

        public ulong Timeline { get; }

        /// <summary>Seed of the random numbers: <see cref="Sampling.Seed"/>, or the one that the sidecar chose. 0
        /// until the job runs.</summary>
        public uint Seed { get; private set; }

        /// <summary>The answer so far.</summary>
        public string Text => _text.ToString();

        /// <summary>What the model has thought so far, if <see cref="JobOptions.Thinking"/> is "shown". It is not in
        /// <see cref="Text"/>.</summary>
        public string Thought => _thought.ToString();

        /// <summary>Ends with the whole answer, with a <see cref="FrameshardException"/>, or as cancelled.</summary>
        public Task<Completion> Completion => _end.Task;

        /// <summary>Raised with the next part of the answer. It never ends within a character.</summary>
        public event Action<string> OnToken;

        /// <summary>Raised with each whole sentence of the answer, without white space around it, after
        /// <see cref="OnToken"/> for its last part. Only for a job with <see cref="JobOptions.Sentences"/>.</summary>
        public event Action<string> OnSentence;

        /// <summary>Raised with each call of a tool, when it is whole.</summary>
        public event Action<ToolCall> OnToolCall;

        /// <summary>The calls of tools so far.</summary>
        public IReadOnlyList<ToolCall> ToolCalls => _calls;

        /// <summary>Raised with the next part of the thought. It never ends within a character.</summary>
        public event Action<string> OnThought;

        /// <summary>Raised for a job with images or a long prompt before its text, for a progress bar.</summary>
        public event Action<Progress> OnProgress;

        /// <summary>True while a job of higher priority has this job's place. It continues on its own.</summary>
        public bool IsPaused { get; private set; }

        /// <summary>Raised when a job of higher priority has taken this job's place.</summary>
        public event Action OnPaused;

        /// <summary>Raised when the paused job continues.</summary>
        public event Action OnResumed;

        /// <summary>Ends the answer early. Does nothing if the job has ended. Any thread may call it.</summary>
        public void Cancel() => Sidecar.Cancel(this);

        /// <summary>Changes the priority: 0 for background, 1 for normal, 2 for urgent. Takes effect at once: it may
        /// pause another job, or this one. Does nothing if the job has ended. Any thread may call it.</summary>
        public void SetPriority(uint priority) => Sidecar.SetPriority(this, priority);

        internal void Start(uint seed) => Seed = seed;

        internal void Add(string text, bool sentenceEnd)
        {
            _text.Append(text);
            OnToken?.Invoke(text);
            if (!sentenceEnd) return;
            var sentence = _text.ToString(_spoken, _text.Length - _spoken).Trim();
            _spoken = _text.Length;
            OnSentence?.Invoke(sentence);
        }

        internal void Call(ToolCall call)
        {
            _calls.Add(call);
            OnToolCall?.Invoke(call);
        }

        internal void Think(string text)
        {
            _thought.Append(text);
            OnThought?.Invoke(text);
        }

        internal void Tell(Progress progress) => OnProgress?.Invoke(progress);

        internal void Pause(bool paused)
        {
            IsPaused = paused;
            (paused ? OnPaused : OnResumed)?.Invoke();
        }

        internal void Finish(Completion completion)
        {
            Registration.Dispose();
            completion.Text = Text;
            completion.Seed = Seed;
            _end.TrySetResult(completion);
        }

        internal void Fail(FrameshardException error)
        {
            Registration.Dispose();
            _end.TrySetException(error);
        }

        internal void EndCancelled()
        {
            Registration.Dispose();
            _end.TrySetCanceled();
        }
    }
}
