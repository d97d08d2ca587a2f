using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.InteropServices;
using System.Threading;
using System.Threading.Tasks;

namespace Frameshard
{
    /// <summary>
    /// A session with a sidecar. Call <see cref="Poll"/> once a frame: events are raised and awaited tasks continue
    /// only inside it. Only <see cref="Run{T}"/>, <see cref="Wait"/> and <see cref="Dispose()"/> wait. Call
    /// <see cref="Poll"/>, <see cref="Run{T}"/> and <see cref="Wait"/> from one thread; any thread may call the other
    /// methods. Failed calls throw <see cref="FrameshardException"/>. A launched sidecar ends when this object is
    /// disposed or garbage-collected, when its application domain unloads, and when the process ends.
    /// </summary>
    public sealed class Sidecar : IDisposable
    {
        private const double Mebibyte = 1024 * 1024;
        private const int Batch = 32;
        private const double SliceSeconds = 0.01; // length of a wait; between two of them, other threads may call
        private const double ClosedPauseSeconds = 0.05;

        private static readonly List<WeakReference> Open = new List<WeakReference>();

        private readonly Gate _gate = new Gate(); // the C library allows one call at a time for a client
        private readonly ClientHandle _client;
        private readonly Native.Event[] _buffer = new Native.Event[Batch];
        private readonly Queue<Action> _pending = new Queue<Action>();
        private readonly Dictionary<ulong, Job> _jobs = new Dictionary<ulong, Job>();
        private readonly Dictionary<ulong, Request> _requests = new Dictionary<ulong, Request>();
        private readonly TaskCompletionSource<ModelInfo> _ready = new TaskCompletionSource<ModelInfo>();
        private bool _closed;
        private FrameshardException _why;

        /// <summary>What an event points to. The next fs_poll and <see cref="Dispose()"/> free the originals.</summary>
        private sealed class Copies
        {
            internal string Text;
            internal string Detail;
            internal string CallId;
            internal string Name;
            internal float[][] Rows;
        }

        /// <summary>A request that waits for its answer. A lease has three answers.</summary>
        private sealed class Request
        {
            internal AnswerCall Answer;
            internal Action<FrameshardException> Fail;
        }

        static Sidecar()
        {
            AppDomain.CurrentDomain.DomainUnload += (sender, args) => CloseAll();
            AppDomain.CurrentDomain.ProcessExit += (sender, args) => CloseAll();
        }

        private Sidecar(ClientHandle client)
        {
            _client = client;
            lock (Open)
            {
                Open.RemoveAll(entry => entry.Target == null);
                Open.Add(new WeakReference(this));
            }
        }

        /// <summary>Ends when the sidecar has loaded its model, or with a <see cref="FrameshardException"/> if it
        /// could not.</summary>
        public Task<ModelInfo> Ready => _ready.Task;

        /// <summary>Raised when a change of the budget is in force.</summary>
        public event Action<BudgetResult> OnBudgetChanged;

        public event Action<EngineChange> OnEngineChanged;

        /// <summary>Raised with news about VRAM and the lease. The game need not react.</summary>
        public event Action<Notice> OnNotice;

        /// <summary>Raised with the progress of a load: before the sidecar is ready if <c>LaunchOptions.Loading</c> is
        /// "on", and when an engine starts again.</summary>
        public event Action<Loading> OnLoading;

        /// <summary>Raised when the sidecar refuses a request that has no task, such as
        /// <see cref="SetPacing"/>.</summary>
        public event Action<FrameshardException> OnRefused;

        /// <summary>Raised once, as the last event, with the reason why the session has ended.</summary>
        public event Action<FrameshardException> OnClosed;

        public bool IsClosed
        {
            get { using (_gate.Enter()) return _closed; }
        }

        /// <summary>Why the session has ended; null before. After the end, every call fails with this
        /// reason.</summary>
        public FrameshardException CloseReason
        {
            get { using (_gate.Enter()) return _why; }
        }

        /// <summary>Starts a sidecar. Returns at once. Questions asked before <see cref="Ready"/> wait for
        /// it.</summary>
        /// <exception cref="FrameshardException">An option is invalid, the process cannot be started, or the native
        /// library cannot be loaded.</exception>
        public static Sidecar Launch(LaunchOptions options)
        {
            if (options == null) throw new ArgumentNullException(nameof(options));
            CheckLibrary();
            using (var texts = new Utf8())
            {
                Native.fs_launch_options_init(out var native, Size<Native.LaunchOptions>());
                Options.Fill(ref native, options, texts);
                Check(Native.fs_launch(ref native, out var client));
                return new Sidecar(client);
            }
        }

        /// <summary>Starts a session with a running sidecar, by the path of its connect file.</summary>
        /// <exception cref="FrameshardException">The file does not exist or is not a connect file, or the native
        /// library cannot be loaded.</exception>
        public static Sidecar Connect(string connectFile, string clientName = "csharp")
        {
            CheckLibrary();
            using (var texts = new Utf8())
            {
                Check(Native.fs_connect(texts.Name(connectFile), texts.Name(clientName), out var client));
                return new Sidecar(client);
            }
        }

        /// <summary>Returns true if the sidecar supports a feature, a name from PROTOCOL.md ("Features"). False
        /// before <see cref="Ready"/>.</summary>
        public bool HasFeature(string feature)
        {
            using (var texts = new Utf8())
            {
                var name = texts.Name(feature);
                using (_gate.Enter()) return !_closed && Native.fs_has_feature(_client, name) != 0;
            }
        }

        /// <summary>Ends every sidecar of this application domain. In Unity's editor it is called before code is
        /// reloaded and when Play mode ends.</summary>
        public static void CloseAll()
        {
            List<WeakReference> open;
            lock (Open) open = new List<WeakReference>(Open);
            foreach (var entry in open) (entry.Target as Sidecar)?.Dispose();
        }

        /// <summary>Starts a job that answers <paramref name="text"/>. <paramref name="onToken"/> is called with each
        /// part of the answer. The token cancels the job.</summary>
        public Job Ask(string text, JobOptions options = null, Action<string> onToken = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                var pointer = texts.Text(text ?? "", out var length);
                return Begin(texts, options, onToken, cancellation, (ref Native.JobOptions native, out ulong id) =>
                    Native.fs_ask(_client, pointer, length, ref native, out id));
            }
        }

        /// <summary>Has the model go on after an answer of <see cref="Ask"/> that ended with calls of tools.
        /// <paramref name="results"/> has a text for each call, by its id. <see cref="JobOptions.Conversation"/> is
        /// needed. A question instead is possible, too: then the calls are forgotten.</summary>
        public Job ToolResults(IReadOnlyDictionary<string, string> results, JobOptions options,
            Action<string> onToken = null, CancellationToken cancellation = default(CancellationToken))
        {
            if (results == null) throw new ArgumentNullException(nameof(results));
            using (var texts = new Utf8())
            {
                var natives = new Native.ToolResult[results.Count];
                var index = 0;
                foreach (var result in results)
                {
                    var content = texts.Text(result.Value ?? "", out var length);
                    natives[index++] = new Native.ToolResult
                    {
                        CallId = texts.Name(result.Key, "the id of a call"), Content = content, ContentLength = length,
                    };
                }
                return Begin(texts, options, onToken, cancellation, (ref Native.JobOptions native, out ulong id) =>
                    Native.fs_tool_results(_client, natives, (uint)natives.Length, ref native, out id));
            }
        }

        /// <summary>Like <see cref="Ask"/>, for games that keep the history themselves: <paramref name="messages"/>
        /// is the whole prompt.</summary>
        public Job Chat(IReadOnlyList<ChatMessage> messages, JobOptions options = null, Action<string> onToken = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (messages == null) throw new ArgumentNullException(nameof(messages));
            using (var texts = new Utf8())
            {
                var native = Pin(texts, messages);
                return Begin(texts, options, onToken, cancellation, (ref Native.JobOptions made, out ulong id) =>
                    Native.fs_chat_with_tools(_client, native, (uint)native.Length, ref made, out id));
            }
        }

        /// <summary>Like <see cref="Ask"/>, but the model continues <paramref name="prompt"/>, without a chat
        /// template.</summary>
        public Job Complete(string prompt, JobOptions options = null, Action<string> onToken = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                var pointer = texts.Text(prompt ?? "", out var length);
                return Begin(texts, options, onToken, cancellation, (ref Native.JobOptions native, out ulong id) =>
                    Native.fs_complete(_client, pointer, length, ref native, out id));
            }
        }

        /// <summary>Like <see cref="Ask"/>, but returns a task with the whole answer.</summary>
        public Task<Completion> AskAsync(string text, JobOptions options = null, Action<string> onToken = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (cancellation.IsCancellationRequested) return Cancelled<Completion>();
            return Ask(text, options, onToken, cancellation).Completion;
        }

        /// <summary>Clears the history of a conversation, once the questions asked before this call are answered. The
        /// system text stays.</summary>
        public void Forget(string conversation)
        {
            using (var texts = new Utf8())
            {
                var name = texts.Name(conversation);
                using (_gate.Enter()) Check(Closable(() => Native.fs_forget(_client, name)));
            }
        }

        /// <summary>Returns the history of a conversation, oldest first: its system text, questions and answers, with
        /// calls of tools and their results. An answer that is open, or was ended early, is in it as far as it was
        /// polled.</summary>
        public IReadOnlyList<ChatMessage> History(string conversation)
        {
            using (var texts = new Utf8())
            {
                var name = texts.Name(conversation);
                using (_gate.Enter())
                {
                    CheckUndisposed();
                    Check(Native.fs_history_with_tools(_client, name, out var first, out var count));
                    var messages = new ChatMessage[count];
                    for (var index = 0; index < messages.Length; index++)
                    {
                        var native = Item<Native.ChatMessage>(first, index);
                        var content = Utf8.Read(native.Content, (uint)native.ContentLength);
                        var calls = native.NToolCalls == 0 ? null : ReadCalls(native.ToolCalls, native.NToolCalls);
                        var callId = native.ToolCallId == IntPtr.Zero ? null : Utf8.Read(native.ToolCallId);
                        messages[index] = new ChatMessage(Utf8.Read(native.Role), content, calls, callId);
                    }
                    return messages;
                }
            }
        }

        private static ToolCall[] ReadCalls(IntPtr first, uint count)
        {
            var calls = new ToolCall[count];
            for (var index = 0; index < calls.Length; index++)
            {
                var native = Item<Native.ToolCall>(first, index);
                calls[index] = new ToolCall
                {
                    CallId = Utf8.Read(native.CallId), Name = Utf8.Read(native.Name),
                    Arguments = Utf8.Read(native.Arguments),
                };
            }
            return calls;
        }

        private static T Item<T>(IntPtr first, int index)
        {
            return (T)Marshal.PtrToStructure(IntPtr.Add(first, index * Marshal.SizeOf(typeof(T))), typeof(T));
        }

        /// <summary>Returns the <see cref="History"/> of a conversation as bytes, for <see cref="Load"/> and for the
        /// other bindings. These are kilobytes, 1 MiB at most; the oldest exchanges of a longer history are left
        /// out. Wait for <see cref="Ready"/> first; before, it fails with ConnectionLost.</summary>
        public byte[] Save(string conversation)
        {
            using (var texts = new Utf8())
            {
                var name = texts.Name(conversation);
                using (_gate.Enter())
                {
                    CheckUndisposed();
                    Check(Native.fs_save(_client, name, out var data, out var size));
                    var bytes = new byte[size];
                    Marshal.Copy(data, bytes, 0, bytes.Length);
                    return bytes;
                }
            }
        }

        /// <summary>Replaces a conversation by a save, once the questions asked before this call are answered. The
        /// next question computes its prompt again. The save may be from another sidecar, model, budget or
        /// binding. Wait for <see cref="Ready"/> first; before, it fails with ConnectionLost.</summary>
        /// <exception cref="FrameshardException">BadSave: the bytes are damaged, too large, of a newer format, or no
        /// save. Nothing changes.</exception>
        public LoadResult Load(byte[] data, string conversation)
        {
            using (var texts = new Utf8())
            {
                var name = texts.Name(conversation);
                var native = new Native.LoadResult { StructSize = Size<Native.LoadResult>() };
                var size = (ulong)(data?.LongLength ?? 0);
                using (_gate.Enter()) Check(Closable(() => Native.fs_load(_client, data, size, name, ref native)));
                return new LoadResult { SameModel = native.SameModel != 0, SameTemplate = native.SameTemplate != 0 };
            }
        }

        /// <summary>Has the sidecar write the KV cache of a conversation to a file, so that after <see cref="Load"/>
        /// and <see cref="LoadKvAsync"/> its next question need not read the whole text again.</summary>
        public Task<KvResult> SaveKvAsync(string conversation, string path,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                IntPtr name = texts.Name(conversation), file = texts.Name(path);
                return Ask(cancellation, (out ulong id) => Native.fs_save_kv(_client, name, file, out id), Kv);
            }
        }

        /// <summary>Has the sidecar read a file of <see cref="SaveKvAsync"/>. Ask the conversation's next question when
        /// the task has ended. A file that is damaged, or of another model, device, mode, KvType or version, is not
        /// used; then the text is read anew.</summary>
        public Task<KvResult> LoadKvAsync(string path, string conversation,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                IntPtr name = texts.Name(conversation), file = texts.Name(path);
                return Ask(cancellation, (out ulong id) => Native.fs_load_kv(_client, file, name, out id), Kv);
            }
        }

        private static KvResult Kv(Native.Event answer, Copies copies)
        {
            return new KvResult { NTokens = answer.NTokens, FileBytes = answer.FileBytes, Detail = copies.Text };
        }

        /// <summary>Proposes a lease, which limits all VRAM that the sidecar uses. Jobs continue, at the rate that
        /// the lease allows.</summary>
        public LeaseChange SetLease(Lease lease)
        {
            if (lease == null) throw new ArgumentNullException(nameof(lease));
            var change = new LeaseChange();
            using (var texts = new Utf8())
            {
                Native.fs_lease_init(out var native, Size<Native.Lease>());
                Options.Fill(ref native, lease, texts);
                Begin((out ulong id) => Native.fs_set_lease(_client, ref native, out id),
                    (answer, copies) => Go(change, answer), error =>
                    {
                        change.Decision.TrySetException(error);
                        change.Release.TrySetException(error);
                        change.Observation.TrySetException(error);
                    });
            }
            return change;
        }

        /// <summary><see cref="SetLease"/> with this budget (MiB; 0: no limit) and deadline, and defaults for the
        /// rest. The task ends when the VRAM is released. The token cancels the task, not the lease.</summary>
        public Task<BudgetResult> SetBudgetAsync(double vramBudgetMb, double timeoutSeconds = 5,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (cancellation.IsCancellationRequested) return Cancelled<BudgetResult>();
            var change = SetLease(new Lease { VramBudgetMb = vramBudgetMb, TimeoutSeconds = timeoutSeconds });
            return Waiting(change.Release, cancellation);
        }

        /// <summary>Returns the lease in force, the floor and the VRAM in use.</summary>
        public Task<Budget> GetBudgetAsync(CancellationToken cancellation = default(CancellationToken))
        {
            return Ask(cancellation, (out ulong id) => Native.fs_get_budget(_client, out id),
                (answer, copies) => new Budget
                {
                    State = (LeaseState)answer.LeaseState, Version = answer.Version, BudgetBytes = answer.BudgetBytes,
                    FloorBytes = answer.FloorBytes, FullBytes = answer.FullBytes, UsedBytes = answer.UsedBytes,
                    WantedBytes = answer.WantedBytes, HostBudgetBytes = answer.HostBudgetBytes,
                    HostFloorBytes = answer.HostFloorBytes, HostUsedBytes = answer.HostUsedBytes,
                });
        }

        /// <summary>Returns how much VRAM the device has and the model needs.</summary>
        public Task<Caps> GetCapsAsync(CancellationToken cancellation = default(CancellationToken))
        {
            return Ask(cancellation, (out ulong id) => Native.fs_get_caps(_client, out id),
                (answer, copies) => new Caps
                {
                    Device = copies.Text, TotalBytes = Known(answer.TotalBytes), FreeBytes = Known(answer.FreeBytes),
                    FloorBytes = answer.FloorBytes, FullBytes = answer.FullBytes, DetailJson = copies.Detail,
                    HostTotalBytes = Known(answer.HostTotalBytes), HostFreeBytes = Known(answer.HostFreeBytes),
                    HostFloorBytes = answer.HostFloorBytes,
                });
        }

        /// <summary>Predicts how fast the model would be at a VRAM budget (MiB) with a prompt of
        /// <paramref name="promptTokens"/>. Changes nothing.</summary>
        public Task<Plan> GetPlanAsync(double vramBudgetMb, uint promptTokens,
            CancellationToken cancellation = default(CancellationToken))
        {
            var bytes = Bytes(vramBudgetMb);
            return Ask(cancellation, (out ulong id) => Native.fs_get_plan(_client, bytes, promptTokens, out id),
                (answer, copies) => new Plan
                {
                    BudgetBytes = answer.BudgetBytes, Fits = answer.Fits != 0, FirstTokenSeconds = answer.TtftS,
                    TokensPerSecond = answer.TokensPerSecond, ResidentBytes = answer.ResidentBytes,
                    StreamedBytes = answer.StreamedBytes, CpuBytes = answer.CpuBytes,
                });
        }

        /// <summary>Loads the LoRA adapter (GGUF) at <paramref name="path"/>, which jobs may then use by
        /// <paramref name="name"/>. It stays loaded if the engine restarts.</summary>
        public Task<LoadedAdapters> LoadAdapterAsync(string name, string path,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                IntPtr called = texts.Name(name), at = texts.Name(path);
                return Ask(cancellation, (out ulong id) => Native.fs_load_adapter(_client, called, at, out id),
                    ReadAdapters);
            }
        }

        /// <summary>Unloads a LoRA adapter and frees its VRAM. Refused while a job that has not ended uses
        /// it.</summary>
        public Task<LoadedAdapters> UnloadAdapterAsync(string name,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                var called = texts.Name(name);
                return Ask(cancellation, (out ulong id) => Native.fs_unload_adapter(_client, called, out id),
                    ReadAdapters);
            }
        }

        private static LoadedAdapters ReadAdapters(Native.Event answer, Copies copies)
        {
            return new LoadedAdapters { FloorBytes = answer.FloorBytes, DetailJson = copies.Detail };
        }

        /// <summary>Counts the tokens of the prompt of <see cref="Complete"/>, without a job.</summary>
        public Task<TokenCount> CountTokensAsync(string prompt,
            CancellationToken cancellation = default(CancellationToken))
        {
            using (var texts = new Utf8())
            {
                var pointer = texts.Text(prompt ?? "", out var length);
                return Ask(cancellation, (out ulong id) => Native.fs_count_tokens(_client, pointer, length, out id),
                    (answer, copies) => new TokenCount { NTokens = answer.NTokens, NLeft = answer.NLeft });
            }
        }

        /// <summary>Counts the tokens of the messages of <see cref="Chat"/>, as the model's chat template renders
        /// them, and of <see cref="JobOptions.Tools"/>, which the prompt describes.</summary>
        public Task<TokenCount> CountTokensAsync(IReadOnlyList<ChatMessage> messages, Tool[] tools = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (messages == null) throw new ArgumentNullException(nameof(messages));
            using (var texts = new Utf8())
            {
                var native = Pin(texts, messages);
                var nTools = (uint)(tools?.Length ?? 0);
                var pinned = nTools == 0 ? IntPtr.Zero : Pin(texts, tools);
                return Ask(cancellation,
                    (out ulong id) => Native.fs_count_chat_tokens_with_tools(
                        _client, native, (uint)native.Length, pinned, nTools, out id),
                    (answer, copies) => new TokenCount { NTokens = answer.NTokens, NLeft = answer.NLeft });
            }
        }

        /// <summary>Asks the sentence encoder (<see cref="LaunchOptions.Embedder"/>) for the embeddings of 1 to 64
        /// texts. Texts of similar meaning have rows with a large dot product.</summary>
        public Task<Embeddings> EmbedAsync(IReadOnlyList<string> texts,
            CancellationToken cancellation = default(CancellationToken))
        {
            if (texts == null) throw new ArgumentNullException(nameof(texts));
            using (var pinned = new Utf8())
            {
                var starts = new IntPtr[texts.Count];
                var lengths = new int[texts.Count];
                for (var index = 0; index < starts.Length; index++)
                {
                    starts[index] = pinned.Text(texts[index] ?? "", out lengths[index]);
                }
                return Ask(cancellation,
                    (out ulong id) => Native.fs_embed(_client, starts, lengths, (uint)starts.Length, out id),
                    (answer, copies) =>
                        new Embeddings { NDim = answer.NDim, Rows = copies.Rows, NTokens = answer.NTokens });
            }
        }

        private static float[][] ReadRows(Native.Event answer)
        {
            var rows = new float[answer.NRows][];
            for (var index = 0; index < rows.Length; index++)
            {
                rows[index] = new float[answer.NDim];
                var offset = index * (long)answer.NDim * sizeof(float);
                Marshal.Copy(new IntPtr(answer.Rows.ToInt64() + offset), rows[index], 0, rows[index].Length);
            }
            return rows;
        }

        /// <summary>Sets how the GPU is shared with the frames in the <see cref="FrameBlock"/>.</summary>
        /// <param name="mode">Who may use GPU time first.</param>
        /// <param name="targetTokensPerSecond">Limit for all jobs together, 0.1 to 10,000; 0: no limit.</param>
        public void SetPacing(SchedulingMode mode, double targetTokensPerSecond = 0)
        {
            using (_gate.Enter())
                Check(Closable(() => Native.fs_set_pacing(_client, (int)mode, targetTokensPerSecond, out _)));
        }

        /// <summary>Returns the path of the sidecar's frame block, for <see cref="FrameBlock.Open"/>.</summary>
        public Task<string> GetFrameBlockAsync(CancellationToken cancellation = default(CancellationToken))
        {
            return Ask(cancellation, (out ulong id) => Native.fs_get_frame_block(_client, out id),
                (answer, copies) => copies.Text);
        }

        /// <summary>Returns the current figures of the sidecar, a JSON object: {"broker": {...}, "engine": {...} or
        /// null}.</summary>
        public Task<string> GetStatsAsync(CancellationToken cancellation = default(CancellationToken))
        {
            return Ask(cancellation, (out ulong id) => Native.fs_get_stats(_client, out id),
                (answer, copies) => copies.Detail);
        }

        /// <summary>Ends the sidecar for all its clients. <see cref="OnClosed"/> follows.</summary>
        public void Shutdown()
        {
            using (_gate.Enter()) Check(Closable(() => Native.fs_shutdown(_client)));
        }

        /// <summary>Call it once a frame. Raises at most <paramref name="limit"/> events and returns their number.
        /// Never waits. An exception of a handler is thrown from here; the remaining events come with the next
        /// call.</summary>
        public int Poll(int limit = 256)
        {
            var raised = 0;
            while (raised < limit)
            {
                Action next;
                using (_gate.Enter())
                {
                    if (_pending.Count == 0 && !Fetch(Math.Min(Batch, limit - raised))) break;
                    next = _pending.Dequeue();
                }
                raised++;
                next();
            }
            return raised;
        }

        /// <summary>For programs without a frame loop. Polls until the task has ended and returns its result. Throws
        /// the <see cref="CloseReason"/> if the session ends before.</summary>
        public T Run<T>(Task<T> task)
        {
            while (!task.IsCompleted)
            {
                if (Poll() > 0) continue;
                if (IsClosed) throw Gone();
                Wait(0.1);
            }
            return task.GetAwaiter().GetResult();
        }

        /// <summary>For programs without a frame loop. Waits at most <paramref name="timeoutSeconds"/> until
        /// <see cref="Poll"/> has an event. After the end of the session it returns within 0.05 s.</summary>
        public void Wait(double timeoutSeconds)
        {
            var clock = Stopwatch.StartNew();
            do
            {
                while (_gate.IsWanted && clock.Elapsed.TotalSeconds < timeoutSeconds) Thread.Sleep(1);
                using (_gate.Enter()) // left between short waits, so that other threads can call
                {
                    if (_pending.Count > 0) return;
                    if (_closed) break;
                    if (Native.fs_wait(_client, SliceSeconds) != 0) return;
                }
            }
            while (clock.Elapsed.TotalSeconds < timeoutSeconds);
            if (IsClosed) Thread.Sleep((int)(1000 * Math.Max(0, Math.Min(ClosedPauseSeconds, timeoutSeconds))));
        }

        /// <summary>Ends the session, and a launched sidecar, for whose end it waits up to 1 s. Unfinished tasks fail
        /// with ConnectionLost.</summary>
        public void Dispose()
        {
            using (_gate.Enter())
            {
                if (_client.IsClosed) return;
                _closed = true;
                _why = _why ?? new FrameshardException(ErrorCode.ConnectionLost, "the sidecar was closed");
                _pending.Clear();
                _client.Dispose();
            }
            lock (Open) Open.RemoveAll(entry => entry.Target == null || entry.Target == this);
            EndAll(Gone());
        }

        internal void Cancel(Job job)
        {
            using (_gate.Enter())
            {
                if (!_closed && _jobs.ContainsKey(job.Id)) Native.fs_cancel(_client, job.Id);
            }
        }

        internal void SetPriority(Job job, uint priority)
        {
            using (_gate.Enter())
            {
                if (!_closed && _jobs.ContainsKey(job.Id))
                {
                    var status = Native.fs_set_priority(_client, job.Id, priority);
                    if (status != (int)ErrorCode.UnknownJob && status != (int)ErrorCode.ConnectionLost) Check(status);
                }
            }
        }

        private delegate int SubmitCall(ref Native.JobOptions options, out ulong id);

        private delegate int RequestCall(out ulong id);

        private delegate void AnswerCall(Native.Event answer, Copies copies);

        private Job Begin(Utf8 texts, JobOptions options, Action<string> onToken, CancellationToken cancellation,
            SubmitCall submit)
        {
            options = options ?? new JobOptions();
            Native.fs_job_options_init(out var native, Size<Native.JobOptions>());
            native.Conversation = texts.Name(options.Conversation, nameof(options.Conversation));
            native.System = texts.Name(options.System, nameof(options.System));
            native.Timeline = options.Timeline;
            native.Window = options.Window ?? native.Window;
            native.Sentences = options.Sentences ? 1UL : 0UL;
            native.WarmUp = options.WarmUp ? 1UL : 0UL;
            native.Priority = options.Priority ?? native.Priority;
            native.DeadlineMs = options.DeadlineMs;
            native.Thinking = texts.Name(options.Thinking, nameof(options.Thinking));
            native.ThinkingTokens = options.ThinkingTokens;
            native.TemplateKeywords = texts.Name(options.TemplateKeywords, nameof(options.TemplateKeywords));
            native.LocalOnly = options.LocalOnly ? 1UL : 0UL;
            if (options.Sampling != null) native.Sampling = Pin(texts, options.Sampling);
            if (options.Images != null)
            {
                native.NImages = (uint)options.Images.Length;
                native.Images = Pin(texts, options.Images);
            }
            if (options.Adapters != null)
            {
                native.NAdapters = (ulong)options.Adapters.Count;
                native.Adapters = Pin(texts, options.Adapters);
            }
            if (options.Tools != null)
            {
                native.NTools = (ulong)options.Tools.Length;
                native.Tools = Pin(texts, options.Tools);
            }
            native.ToolChoice = texts.Name(options.ToolChoice, nameof(options.ToolChoice));
            var job = new Job(this, options.Timeline, onToken);
            using (_gate.Enter())
            {
                var id = 0UL;
                Check(Closable(() => submit(ref native, out id)));
                job.Id = id;
                _jobs[id] = job;
            }
            if (cancellation.CanBeCanceled) job.Registration = cancellation.Register(job.Cancel);
            return job;
        }

        private static IntPtr Pin(Utf8 texts, Sampling sampling)
        {
            Native.fs_sampling_init(out var native, Size<Native.Sampling>());
            Options.Fill(ref native, sampling, texts);
            var block = texts.Block(Marshal.SizeOf(typeof(Native.Sampling)));
            Marshal.StructureToPtr(native, block, false);
            return block;
        }

        private static IntPtr Pin(Utf8 texts, Tool[] tools)
        {
            return texts.Array(tools, "Tools", tool => new Native.Tool
            {
                Name = texts.Name(tool.Name), Description = texts.Name(tool.Description, "a tool's Description"),
                Schema = texts.Name(tool.Schema, "a tool's Schema"),
            });
        }

        private static IntPtr Pin(Utf8 texts, IReadOnlyDictionary<string, double> adapters)
        {
            return texts.Array(adapters, "Adapters", adapter => new Native.Adapter
            {
                Name = texts.Name(adapter.Key), Scale = adapter.Value,
            });
        }

        private static Native.ChatMessage[] Pin(Utf8 texts, IReadOnlyList<ChatMessage> messages)
        {
            var native = new Native.ChatMessage[messages.Count];
            for (var index = 0; index < native.Length; index++)
            {
                var message = messages[index];
                native[index].Role = texts.Name(message.Role ?? "", "a Role");
                native[index].Content = texts.Text(message.Content ?? "", out var length);
                native[index].ContentLength = length;
                native[index].ToolCallId = texts.Name(message.ToolCallId, "a ToolCallId");
                if (message.ToolCalls == null) continue;
                native[index].NToolCalls = (uint)message.ToolCalls.Count;
                native[index].ToolCalls = Pin(texts, message.ToolCalls);
            }
            return native;
        }

        private static IntPtr Pin(Utf8 texts, IReadOnlyList<ToolCall> calls)
        {
            return texts.Array(calls, "ToolCalls", call => new Native.ToolCall
            {
                CallId = texts.Name(call.CallId, "a CallId"), Name = texts.Name(call.Name),
                Arguments = texts.Name(call.Arguments, "the Arguments of a call"),
            });
        }

        private static IntPtr Pin(Utf8 texts, Image[] images)
        {
            return texts.Array(images, "Images", image =>
            {
                var data = image.Data ?? new byte[0];
                var native = new Native.Image
                {
                    Format = (uint)image.Format, Width = image.Width, Height = image.Height, Stride = image.Stride,
                    Data = texts.Block(data.Length), Size = (ulong)data.Length,
                };
                Marshal.Copy(data, 0, native.Data, data.Length);
                return native;
            });
        }

        private void Begin(RequestCall call, AnswerCall answer, Action<FrameshardException> fail)
        {
            using (_gate.Enter())
            {
                var id = 0UL;
                Check(Closable(() => call(out id)));
                _requests[id] = new Request { Answer = answer, Fail = fail };
            }
        }

        private Task<T> Ask<T>(CancellationToken cancellation, RequestCall call,
            Func<Native.Event, Copies, T> read)
        {
            if (cancellation.IsCancellationRequested) return Cancelled<T>();
            var end = new TaskCompletionSource<T>();
            Begin(call, (answer, copies) => end.TrySetResult(read(answer, copies)),
                error => end.TrySetException(error));
            return Waiting(end, cancellation);
        }

        private static Task<T> Waiting<T>(TaskCompletionSource<T> end, CancellationToken cancellation)
        {
            if (cancellation.CanBeCanceled)
            {
                var registration = cancellation.Register(() => end.TrySetCanceled());
                end.Task.ContinueWith(_ => registration.Dispose(), TaskContinuationOptions.ExecuteSynchronously);
            }
            return end.Task;
        }

        private void Go(LeaseChange change, Native.Event answer)
        {
            switch (answer.Type)
            {
                case Native.EventType.Lease:
                    change.Decision.TrySetResult(new LeaseAnswer
                    {
                        Decision = (LeaseDecision)answer.Decision, BudgetBytes = answer.BudgetBytes,
                        Seconds = answer.Seconds, Version = answer.Version, HostBudgetBytes = answer.HostBudgetBytes,
                    });
                    break;
                case Native.EventType.BudgetReleased:
                    var result = new BudgetResult
                    {
                        BudgetBytes = answer.BudgetBytes, UsedBytes = answer.UsedBytes, Seconds = answer.Seconds,
                        HostBudgetBytes = answer.HostBudgetBytes, HostUsedBytes = answer.HostUsedBytes,
                    };
                    try
                    {
                        OnBudgetChanged?.Invoke(result);
                    }
                    finally
                    {
                        change.Release.TrySetResult(result);
                    }
                    break;
                default:
                    change.Observation.TrySetResult(new Observation
                    {
                        Bytes = Known(answer.ObservedBytes), Seconds = answer.Seconds,
                        HostObservedBytes = Known(answer.HostObservedBytes),
                    });
                    break;
            }
        }

        /// <summary>What was said can still be read after the end of the session.</summary>
        private void CheckUndisposed()
        {
            if (_client.IsClosed) throw Gone();
        }

        private int Closable(Func<int> call)
        {
            if (_closed) throw Gone();
            return call();
        }

        /// <summary>The exception for calls after the end: after Shutdown (code 0) it is ConnectionLost.</summary>
        private FrameshardException Gone()
        {
            var why = CloseReason;
            var code = why.Code == 0 ? ErrorCode.ConnectionLost : why.Code;
            return new FrameshardException(code, why.Message, why.DetailJson);
        }

        /// <summary>Polls the C library and queues an action for each event. The action runs without the lock, so
        /// all that the event points to is copied here.</summary>
        private bool Fetch(int room)
        {
            if (_client.IsClosed) return false;
            var count = Native.fs_poll(_client, _buffer, Size<Native.Event>(), room);
            if (count < 0) Check(-count);
            for (var index = 0; index < count; index++)
            {
                var native = _buffer[index];
                var copies = new Copies
                {
                    Text = Utf8.Read(native.Text, native.TextLength),
                    Detail = Utf8.Read(native.Detail, native.DetailLength),
                    CallId = Utf8.Read(native.CallId), Name = Utf8.Read(native.Name),
                    Rows = native.Type == Native.EventType.Embeddings ? ReadRows(native) : null,
                };
                _pending.Enqueue(() => Raise(native, copies));
            }
            return count > 0;
        }

        private void Raise(Native.Event native, Copies copies)
        {
            switch (native.Type)
            {
                case Native.EventType.Ready:
                    _ready.TrySetResult(ReadModel());
                    break;
                case Native.EventType.Started:
                    Find(native.Job, false)?.Start((uint)native.Seed);
                    break;
                case Native.EventType.Text:
                    Find(native.Job, false)?.Add(copies.Text, native.SentenceEnd != 0);
                    break;
                case Native.EventType.Thought:
                    Find(native.Job, false)?.Think(copies.Text);
                    break;
                case Native.EventType.ToolCall:
                    Find(native.Job, false)?.Call(new ToolCall
                    {
                        CallId = copies.CallId, Name = copies.Name, Arguments = copies.Text,
                    });
                    break;
                case Native.EventType.Progress:
                    Find(native.Job, false)?.Tell(new Progress
                    {
                        Phase = (Phase)native.Phase, Done = native.Done, Total = native.Total,
                    });
                    break;
                case Native.EventType.Paused:
                case Native.EventType.Resumed:
                    Find(native.Job, false)?.Pause(native.Type == Native.EventType.Paused);
                    break;
                case Native.EventType.Done:
                    Find(native.Job, true)?.Finish(new Completion
                    {
                        Reason = (StopReason)native.Reason, NPrompt = native.NPrompt, NGenerated = native.NGenerated,
                        NReused = native.NReused, NLeft = native.NLeft, NDropped = native.NDropped,
                        NThought = native.NThought,
                        PrefillSeconds = native.PrefillS, DecodeSeconds = native.DecodeS,
                        Remote = native.Remote != 0,
                    });
                    break;
                case Native.EventType.Failed:
                    Find(native.Job, true)?.Fail(Error(native, copies));
                    break;
                case Native.EventType.Cancelled:
                    Find(native.Job, true)?.EndCancelled();
                    break;
                case Native.EventType.Lease:
                case Native.EventType.BudgetReleased:
                    Answered(native.Request, false)?.Answer(native, copies);
                    break;
                case Native.EventType.BudgetObserved:
                case Native.EventType.Budget:
                case Native.EventType.Stats:
                case Native.EventType.Caps:
                case Native.EventType.Plan:
                case Native.EventType.FrameBlock:
                case Native.EventType.TokenCount:
                case Native.EventType.Embeddings:
                case Native.EventType.Adapters:
                case Native.EventType.Kv:
                    Answered(native.Request, true)?.Answer(native, copies);
                    break;
                case Native.EventType.Refused:
                    var request = Answered(native.Request, true);
                    if (request != null) request.Fail(Error(native, copies));
                    else OnRefused?.Invoke(Error(native, copies));
                    break;
                case Native.EventType.Notice:
                    OnNotice?.Invoke(new Notice
                    {
                        Kind = (NoticeKind)native.Notice, BudgetBytes = native.BudgetBytes, Seconds = native.Seconds,
                        HostBudgetBytes = native.HostBudgetBytes,
                        Text = copies.Text,
                    });
                    break;
                case Native.EventType.Loading:
                    OnLoading?.Invoke(new Loading
                    {
                        Stage = (LoadingStage)native.Stage, Done = native.Done, Total = native.Total,
                    });
                    break;
                case Native.EventType.Engine:
                    OnEngineChanged?.Invoke(new EngineChange
                    {
                        State = (EngineState)native.EngineState, Restarts = native.Restarts,
                        Error = native.Status == 0 ? null : Error(native, copies),
                    });
                    break;
                case Native.EventType.Closed:
                    var why = Error(native, copies);
                    using (_gate.Enter())
                    {
                        _closed = true;
                        _why = why;
                    }
                    EndAll(Gone());
                    OnClosed?.Invoke(why);
                    break;
            }
        }

        private Job Find(ulong id, bool last)
        {
            using (_gate.Enter())
            {
                _jobs.TryGetValue(id, out var job);
                if (last) _jobs.Remove(id);
                return job;
            }
        }

        private Request Answered(ulong id, bool last)
        {
            using (_gate.Enter())
            {
                _requests.TryGetValue(id, out var request);
                if (last) _requests.Remove(id);
                return request;
            }
        }

        private void EndAll(FrameshardException error)
        {
            List<Job> jobs;
            List<Request> requests;
            using (_gate.Enter())
            {
                jobs = new List<Job>(_jobs.Values);
                requests = new List<Request>(_requests.Values);
                _jobs.Clear();
                _requests.Clear();
            }
            _ready.TrySetException(error);
            foreach (var job in jobs) job.Fail(error);
            foreach (var request in requests) request.Fail(error);
        }

        private ModelInfo ReadModel()
        {
            using (_gate.Enter())
            {
                var native = new Native.Model { StructSize = Size<Native.Model>() };
                Check(Closable(() => Native.fs_get_model(_client, ref native)));
                return new ModelInfo
                {
                    Name = Utf8.Read(native.Name), Arch = Utf8.Read(native.Arch), Device = Utf8.Read(native.Device),
                    NCtx = native.NCtx, NParallel = native.NParallel, NVocab = native.NVocab, NLayer = native.NLayer,
                    Chat = native.Chat != 0, FloorBytes = native.FloorBytes, FullBytes = native.FullBytes,
                    PlanJson = Utf8.Read(native.PlanJson), Pid = native.Pid,
                    ConnectFile = Utf8.Read(native.ConnectFile), Vision = Utf8.Read(native.Vision),
                    Fingerprint = Utf8.Read(native.Fingerprint),
                    TemplateFingerprint = Utf8.Read(native.TemplateFingerprint),
                    HttpUrl = Utf8.Read(native.HttpUrl), HttpKey = Utf8.Read(native.HttpKey),
                    Embedder = Utf8.Read(native.Embedder),
                    Thinks = native.Thinks != 0, PassedOver = Utf8.Read(native.PassedOver),
                    Sees = native.Sees != 0, Hears = native.Hears != 0,
                };
            }
        }

        private static FrameshardException Error(Native.Event native, Copies copies)
        {
            return new FrameshardException((ErrorCode)native.Status, copies.Text, copies.Detail);
        }

        private static Task<T> Cancelled<T>()
        {
            var end = new TaskCompletionSource<T>();
            end.SetCanceled();
            return end.Task;
        }

        private static long? Known(long bytes) => bytes < 0 ? (long?)null : bytes;

        // Rounded up: a size above 0 must not become 0, "no limit".
        internal static ulong Bytes(double mebibytes)
        {
            if (!(mebibytes >= 0 && mebibytes <= uint.MaxValue))
                throw new FrameshardException(ErrorCode.BadArgument, "a budget is a number of MiB, 0 or more");
            return (ulong)Math.Ceiling(mebibytes * Mebibyte);
        }

        internal static void Check(int status)
        {
            if (status == 0) return;
            var text = Native.fs_last_error(out var length);
            throw new FrameshardException((ErrorCode)status, Utf8.Read(text, length));
        }

        private static void CheckLibrary()
        {
            uint version;
            try
            {
                version = Native.fs_abi_version();
            }
            catch (Exception error) when (error is DllNotFoundException || error is BadImageFormatException
                || error is EntryPointNotFoundException)
            {
                throw new FrameshardException(ErrorCode.Unsupported,
                    "the library libframeshard cannot be loaded; build bindings/c for this system and put it into "
                    + "Assets/Plugins/x86_64 (Unity) or where the system's loader looks, such as LD_LIBRARY_PATH: "
                    + error.Message);
            }
            if (version != Native.AbiVersion)
                throw new FrameshardException(ErrorCode.VersionMismatch,
                    $"this package is made for version {Native.AbiVersion} of the library, not for {version}");
        }

        private static uint Size<T>() => (uint)Marshal.SizeOf(typeof(T));
    }
}
