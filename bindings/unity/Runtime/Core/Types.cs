using System;
using System.Collections.Generic;
using System.Threading.Tasks;

namespace Frameshard
{
    /// <summary>The protocol's error codes.</summary>
    public enum ErrorCode
    {
        // generated: error codes
        Internal = 1,
        BadArgument = 10,
        BadMessage = 11,
        UnknownJob = 12,
        ContextOverflow = 13,
        Unsupported = 14,
        BadSave = 15,
        ModelNotFound = 20,
        BadModel = 21,
        UnknownDevice = 22,
        BudgetBelowFloor = 23,
        VersionMismatch = 24,
        OutOfMemory = 25,
        StaleLease = 26,
        EndpointInUse = 30,
        ConnectionLost = 31,
        EngineDied = 32,
        Overloaded = 33,
        DeadlineMissed = 34,
        Cancelled = 40,
        DownloadFailed = 41,
        // end of error codes
    }

    /// <summary>An error of the sidecar or of the library. <see cref="Exception.Message"/> is a sentence about
    /// it.</summary>
    public sealed class FrameshardException : Exception
    {
        public ErrorCode Code { get; }

        /// <summary>The protocol's name, such as "budget_below_floor".</summary>
        public string Name { get; }

        /// <summary>True if the same call may succeed later without a change.</summary>
        public bool Retriable { get; }

        /// <summary>A JSON object with values that belong to the error, such as floor_bytes; or "".</summary>
        public string DetailJson { get; }

        public FrameshardException(ErrorCode code, string message, string detailJson = "") : base(message)
        {
            Code = code;
            Name = NameOf(code);
            Retriable = IsRetriable(code);
            DetailJson = detailJson;
        }

        // Written here, too, because there is an error for a native library that cannot be loaded.
        private static string NameOf(ErrorCode code)
        {
            switch (code)
            {
                // generated: error names
                case ErrorCode.Internal: return "internal";
                case ErrorCode.BadArgument: return "bad_argument";
                case ErrorCode.BadMessage: return "bad_message";
                case ErrorCode.UnknownJob: return "unknown_job";
                case ErrorCode.ContextOverflow: return "context_overflow";
                case ErrorCode.Unsupported: return "unsupported";
                case ErrorCode.BadSave: return "bad_save";
                case ErrorCode.ModelNotFound: return "model_not_found";
                case ErrorCode.BadModel: return "bad_model";
                case ErrorCode.UnknownDevice: return "unknown_device";
                case ErrorCode.BudgetBelowFloor: return "budget_below_floor";
                case ErrorCode.VersionMismatch: return "version_mismatch";
                case ErrorCode.OutOfMemory: return "out_of_memory";
                case ErrorCode.StaleLease: return "stale_lease";
                case ErrorCode.EndpointInUse: return "endpoint_in_use";
                case ErrorCode.ConnectionLost: return "connection_lost";
                case ErrorCode.EngineDied: return "engine_died";
                case ErrorCode.Overloaded: return "overloaded";
                case ErrorCode.DeadlineMissed: return "deadline_missed";
                case ErrorCode.Cancelled: return "cancelled";
                case ErrorCode.DownloadFailed: return "download_failed";
                // end of error names
                case 0: return "ok"; // the end after Shutdown
                default: return "internal";
            }
        }

        private static bool IsRetriable(ErrorCode code)
        {
            switch (code)
            {
                // generated: retriable errors
                case ErrorCode.OutOfMemory:
                case ErrorCode.ConnectionLost:
                case ErrorCode.EngineDied:
                case ErrorCode.Overloaded:
                case ErrorCode.DeadlineMissed:
                case ErrorCode.DownloadFailed:
                // end of retriable errors
                    return true;
                default:
                    return false;
            }
        }
    }

    /// <summary>Options of <see cref="Sidecar.Launch"/>. Null means the default.</summary>
    public sealed class LaunchOptions
    {
        // generated: fs_launch_options
        /// <summary>Path of a GGUF file; the only option without a default. `PATH@OFFSET+SIZE` is a part of a file,
        /// such as a game's pak file; the offset is a multiple of 32.</summary>
        public string Model;
        /// <summary>`auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device
        /// such as `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s. Default auto.</summary>
        public string Device;
        /// <summary>Limit for all VRAM that the sidecar uses; 0: no limit. In MiB.</summary>
        public double VramBudgetMb;
        /// <summary>Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only
        /// for the tokens in the context. Default 4096.</summary>
        public uint? NCtx;
        /// <summary>Number of jobs that run at once, each in its own context. Default 4.</summary>
        public uint? NParallel;
        /// <summary>Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once
        /// for each graph, and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has
        /// room for 256 tokens; in mode `stream_only` 512. Any other value holds at every budget, and the floor has
        /// room for it.</summary>
        public uint? NUbatch;
        /// <summary>Number of CPU threads; 0: half of the CPUs.</summary>
        public uint? NThreads;
        /// <summary>A client that stays disconnected for this long loses its jobs. A client that is connected but
        /// silent (a breakpoint, a long load) keeps them. Default 10.0.</summary>
        public double? SilentSeconds;
        /// <summary>How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are
        /// encrypted. One of ipc, tcp.</summary>
        public string Transport;
        /// <summary>Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar
        /// chooses.</summary>
        public string Endpoint;
        /// <summary>Path of the file from which other clients learn how to connect; only this user can read it. The
        /// sidecar removes it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it
        /// cannot be written, or if a file is there that is no connect file.</summary>
        public string ConnectFile;
        /// <summary>Command of the Python that has frameshard installed. Default: python3, from PATH.</summary>
        public string Python;
        /// <summary>Path of a file to which the sidecar appends its log. Default: standard error.</summary>
        public string LogFile;
        /// <summary>Name of the client in the sidecar's log, at most 64 bytes. Default csharp.</summary>
        public string ClientName = "csharp";
        /// <summary>A JSON object with further launch options; they take precedence over the others. Default:
        /// none.</summary>
        public string ExtraJson;
        /// <summary>Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty:
        /// none.</summary>
        public string Mmproj;
        /// <summary>`planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every
        /// budget. One of planned, stream_only. Default planned.</summary>
        public string Mode;
        /// <summary>Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified
        /// in one graph, where that is faster. `off`: never. One of auto, off. Default auto.</summary>
        public string Speculate;
        /// <summary>Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It
        /// drafts text that does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at
        /// most 16,384 tokens) are in host memory. It is not loaded with `Speculate` off, without a GPU, or with
        /// recurrent models.</summary>
        public string DraftModel;
        /// <summary>Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`,
        /// at some loss of quality. Refused with `unsupported` if the model's attention head size is not a multiple of
        /// 32. On NVIDIA GPUs the floor stays the same, because a prompt also needs one layer's whole context in 16
        /// bits. One of f16, q8_0, q4_0. Default f16.</summary>
        public string KvType;
        /// <summary>Maximum number of unfinished jobs of all clients. Default 256.</summary>
        public ulong? MaxJobs;
        /// <summary>Maximum number of unfinished jobs of one client. Default 64.</summary>
        public ulong? MaxClientJobs;
        /// <summary>Maximum text kept for one job whose client does not read; with more, the job fails. Default
        /// 49152.</summary>
        public ulong? HeldBytes;
        /// <summary>An engine without work that does not answer for this long is replaced. Default 5.0.</summary>
        public double? HangIdleSeconds;
        /// <summary>An engine with work that does not answer for this long is replaced. Default 60.0.</summary>
        public double? HangBusySeconds;
        /// <summary>An engine that loads and does not answer for this long is replaced. Default 600.0.</summary>
        public double? HangLoadSeconds;
        /// <summary>An engine in which no thread answers for this long counts as stopped and is replaced. Default
        /// 5.0.</summary>
        public double? HangStillSeconds;
        /// <summary>Number of engine deaths within `RestartWindowSeconds` that are followed by a restart; after one
        /// more, the engine is off for `OffPauseSeconds`. Deaths while a job runs do not count, and each new token
        /// starts the count again. Default 3.</summary>
        public ulong? RestartLimit;
        /// <summary>Time span in which `RestartLimit` counts deaths. Default 300.0.</summary>
        public double? RestartWindowSeconds;
        /// <summary>How long an engine that keeps dying stays off before the next try. Each pause is twice as long as
        /// the last. Default 1.0.</summary>
        public double? OffPauseSeconds;
        /// <summary>Maximum length of such a pause. Default 60.0.</summary>
        public double? OffPauseMaxSeconds;
        /// <summary>Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of
        /// texts that several jobs begin with. The least recently used are dropped; 0: none are kept. In MiB. Default
        /// 512.</summary>
        public double KvCacheMb = 512;
        /// <summary>`on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later
        /// loads only. One of off, on. Default off.</summary>
        public string Loading;
        /// <summary>LoRA adapters that jobs may use, each as `NAME=PATH` of a GGUF file. Their weights are in VRAM at
        /// every budget.</summary>
        public string[] Adapters;
        /// <summary>Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one;
        /// empty: nowhere. The HTTP server is a process of its own that ends with the sidecar. Refused with
        /// `bad_argument` if the packages of `frameshard[http]` are not installed, or if the address cannot be listened
        /// on.</summary>
        public string Http;
        /// <summary>Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new
        /// one.</summary>
        public string HttpKey;
        /// <summary>Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a
        /// process for it. That process encodes texts on the CPU at idle priority and uses no VRAM.</summary>
        public string Embedder;
        /// <summary>Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty:
        /// none. Jobs go there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet
        /// their deadline. Needs `frameshard[fallback]`.</summary>
        public string Fallback;
        /// <summary>Name of the model that the server is asked for.</summary>
        public string FallbackModel;
        /// <summary>Path of a file with the server's key, which only this user may read; empty: none.</summary>
        public string FallbackKeyFile;
        /// <summary>Name of the environment variable with the server's key; empty: none.</summary>
        public string FallbackKeyEnv;
        /// <summary>Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where
        /// prompts and the key can be read on the way. One of loopback, anywhere. Default loopback.</summary>
        public string FallbackHttp;
        /// <summary>Limit for all host memory that the sidecar's processes use, with the model's file in the page
        /// cache; 0: no limit. Only on Linux; elsewhere it is refused with `unsupported`. In MiB.</summary>
        public double HostBudgetMb;
        // end of fs_launch_options
    }

    /// <summary>Makes a token, or each token of a text, more or less likely. Set exactly one of Token and Text. Most
    /// words have one token with a space before it and another one without it.</summary>
    public sealed class LogitBias
    {
        public int? Token;
        public string Text;
        /// <summary>Added to the logits, -100 to 100. -100 in effect bans a token, 100 in effect forces it.</summary>
        public double Bias;
    }

    /// <summary>How tokens are chosen. Null means the default. In mode "stream_only" the same values, prompt and seed
    /// give the same text.</summary>
    public sealed class Sampling
    {
        // generated: fs_sampling
        /// <summary>Maximum length of the answer in tokens. Default 256.</summary>
        public int? MaxTokens;
        /// <summary>Choose only among this many most likely tokens; 0: off. Default 40.</summary>
        public int? TopK;
        /// <summary>Randomness of the choice; 0: always the most likely token. Default 0.8.</summary>
        public double? Temperature;
        /// <summary>Choose only among the most likely tokens whose probabilities add up to this value; 1: off. Default
        /// 0.95.</summary>
        public double? TopP;
        /// <summary>Choose only among tokens with at least this fraction of the highest probability; 0: off. Default
        /// 0.05.</summary>
        public double? MinP;
        /// <summary>Above 1, tokens that occur among the last 64 become less likely; 1: off. Default 1.0.</summary>
        public double? RepeatPenalty;
        /// <summary>Seed of the random numbers; without it the sidecar chooses one.</summary>
        public uint? Seed;
        /// <summary>Strings that end the answer; they are not part of it.</summary>
        public string[] Stop;
        /// <summary>A JSON schema. The answer is JSON that matches it, unless `MaxTokens` or `Stop` ends the answer
        /// early; empty: off.</summary>
        public string JsonSchema;
        /// <summary>Subtracted from a token's logit for each time that the token occurs among the last 64; 0:
        /// off.</summary>
        public double? FrequencyPenalty;
        /// <summary>Subtracted once from a token's logit if the token is among the last 64; 0: off.</summary>
        public double? PresencePenalty;
        /// <summary>Locally typical sampling: choose only among the most typical tokens whose probabilities add up to
        /// this value; 1: off. Default 1.0.</summary>
        public double? TypicalP;
        /// <summary>XTC sampling: the chance that all tokens above `XtcThreshold`, except the least likely of them, are
        /// removed; 0: off.</summary>
        public double? XtcProbability;
        /// <summary>XTC sampling removes only tokens with at least this probability. Default 0.1.</summary>
        public double? XtcThreshold;
        /// <summary>The answer is exactly one of these strings. Set at most one of `JsonSchema`, `Choices`, `Regex` and
        /// `Lark`.</summary>
        public string[] Choices;
        /// <summary>The whole answer matches this regular expression, in the syntax of Rust's regex crate; empty:
        /// off.</summary>
        public string Regex;
        /// <summary>The answer matches this grammar in llguidance's variant of Lark; empty: off.</summary>
        public string Lark;
        /// <summary>Tokens that are more or less likely than the model finds them. Several biases of one token add up.
        /// An answer with a form still has it.</summary>
        public LogitBias[] LogitBias;
        /// <summary>DRY sampling: a token that would repeat a sequence of n tokens, n at least `DryAllowedLength`,
        /// loses `DryMultiplier` * `DryBase` ^ (n - `DryAllowedLength`) of its logit; 0: off.</summary>
        public double? DryMultiplier;
        /// <summary>DRY sampling: growth of the penalty with each token. Default 1.75.</summary>
        public double? DryBase;
        /// <summary>DRY sampling: shortest repeated sequence whose next token is penalised. Default 2.</summary>
        public ulong? DryAllowedLength;
        /// <summary>DRY sampling: how many of the last tokens are searched for repeats; 0: off, -1: the whole context.
        /// Default -1.</summary>
        public long? DryPenaltyLastN;
        /// <summary>DRY sampling: no sequence goes beyond one of these strings; empty: line break, colon, quotation
        /// mark and asterisk.</summary>
        public string[] DrySequenceBreakers;
        // end of fs_sampling
    }

    /// <summary>A function of the program that the model may call.</summary>
    public sealed class Tool
    {
        /// <summary>1 to 64 letters, digits, '_' and '-'.</summary>
        public string Name;
        /// <summary>What it does and when to use it, for the model.</summary>
        public string Description;
        /// <summary>JSON schema of the arguments, an object. Null: it has no arguments.</summary>
        public string Schema;
    }

    /// <summary>A call of a tool, in an answer of the model.</summary>
    public sealed class ToolCall
    {
        /// <summary>Id of the call, for <see cref="Sidecar.ToolResults"/>.</summary>
        public string CallId { get; set; }
        /// <summary>Name of the tool.</summary>
        public string Name { get; set; }
        /// <summary>The arguments: JSON that matches the tool's schema.</summary>
        public string Arguments { get; set; }
    }

    /// <summary>Options of a job.</summary>
    public sealed class JobOptions
    {
        /// <summary>Name of the conversation. Its earlier questions and answers are part of the prompt. Null:
        /// none.</summary>
        public string Conversation;
        /// <summary>Sets the conversation's system text (Ask only). Null: unchanged.</summary>
        public string System;
        public Sampling Sampling;
        /// <summary>Images before the question, at most 8. The model needs a vision tower.</summary>
        public Image[] Images;
        /// <summary>A number that the job repeats. A game that increases it when a save is loaded can discard answers
        /// to questions from before the load.</summary>
        public ulong Timeline;
        /// <summary>Maximum number of events that are sent but not polled yet, 1 to 256. Default 32.</summary>
        public uint? Window;
        /// <summary>The job raises <see cref="Job.OnSentence"/>, for text to speech.</summary>
        public bool Sentences;
        /// <summary>0: background, 1: normal (default), 2: urgent. A job pauses a running job of lower priority if
        /// NParallel jobs run; the paused job continues later.</summary>
        public uint? Priority;
        /// <summary>The prompt is only read, so that later jobs whose prompt begins with it need not read it. All other
        /// jobs go first. The answer is empty.</summary>
        public bool WarmUp;
        /// <summary>The job never goes to the server of <see cref="LaunchOptions.Fallback"/>.</summary>
        public bool LocalOnly;
        /// <summary>Scales of LoRA adapters by name, at most 2, for the whole job; from -4 to 4. Jobs with equal
        /// adapters are computed together, others in turns. Null: none.</summary>
        public IReadOnlyDictionary<string, double> Adapters;
        /// <summary>The job fails with DeadlineMissed if it has no token after so many milliseconds, at most 3,600,000; 0:
        /// no deadline. Of jobs of equal priority the one with the earliest deadline goes first.</summary>
        public ulong DeadlineMs;
        /// <summary>"off" or null: the model answers at once. "hidden": it thinks before, and the thought is not sent.
        /// "shown": the job raises <see cref="Job.OnThought"/>. Fails with Unsupported unless
        /// <see cref="ModelInfo.Thinks"/>.</summary>
        public string Thinking;
        /// <summary>Maximum length of the thought in tokens; then it is ended, and the answer begins. 0: no limit but
        /// <see cref="Sampling.MaxTokens"/>, which counts thought and answer.</summary>
        public ulong ThinkingTokens;
        /// <summary>Functions that the model may call: <see cref="Job.OnToolCall"/>. At most 64.</summary>
        public Tool[] Tools;
        /// <summary>"auto" (null): the answer is text, or ends with calls. "required": it is calls. "none": it is text.
        /// The name of a tool: it is calls of this tool.</summary>
        public string ToolChoice;
        /// <summary>A JSON object with further variables for the model's chat template. Null: none.</summary>
        public string TemplateKeywords;
    }

    /// <summary>Encoded: a PNG or JPEG file, or a sound as a WAV or MP3 file. Rgb, Rgba: rows of pixels from top to
    /// bottom, 8 bits a channel; alpha is ignored.</summary>
    public enum ImageFormat
    {
        // generated: ImageFormat
        Encoded = 1,
        Rgb = 2,
        Rgba = 3,
        // end of ImageFormat
    }

    /// <summary>An image in memory.</summary>
    public sealed class Image
    {
        public ImageFormat Format = ImageFormat.Encoded;
        /// <summary>Pixels; 0 if encoded.</summary>
        public uint Width;
        /// <summary>Pixels; 0 if encoded.</summary>
        public uint Height;
        /// <summary>Bytes from the start of one row to the start of the next; 0: no gap between rows.</summary>
        public uint Stride;
        public byte[] Data;
    }

    /// <summary>What a job with images does before its first token. Encode: images are encoded. Prefill: the prompt
    /// is computed.</summary>
    public enum Phase
    {
        // generated: Phase
        Encode = 1,
        Prefill = 2,
        // end of Phase
    }

    /// <summary>Progress of a job with images or a long prompt. Done and Total count images (Encode) or prompt tokens
    /// (Prefill).</summary>
    public struct Progress
    {
        public Phase Phase { get; internal set; }
        public uint Done { get; internal set; }
        public uint Total { get; internal set; }
    }

    /// <summary>One message of a chat; the role is "system", "user", "assistant", or "tool" for the result of a
    /// call.</summary>
    public struct ChatMessage
    {
        public string Role;
        public string Content;
        /// <summary>The calls of an answer, behind its text. Null: none.</summary>
        public IReadOnlyList<ToolCall> ToolCalls;
        /// <summary>Of a result: the <see cref="ToolCall.CallId"/> of its call. Else null.</summary>
        public string ToolCallId;

        public ChatMessage(
            string role, string content, IReadOnlyList<ToolCall> toolCalls = null, string toolCallId = null)
        {
            Role = role;
            Content = content;
            ToolCalls = toolCalls;
            ToolCallId = toolCallId;
        }
    }

    /// <summary>Why an answer is complete. Stop: the model ended it, or a stop string came. Length: MaxTokens was
    /// reached. ToolCalls: it ended with calls of tools, which wait for their results.</summary>
    public enum StopReason
    {
        // generated: StopReason
        Stop = 1,
        Length = 2,
        ToolCalls = 3,
        // end of StopReason
    }

    public enum EngineState
    {
        // generated: EngineState
        Loading = 1,
        Ready = 2,
        Restarting = 3,
        Off = 4,
        Hibernated = 5,
        // end of EngineState
    }

    /// <summary>Parked: only the driver's context is in VRAM. Hibernated: the engine process has ended and no VRAM is
    /// used.</summary>
    public enum LeaseState
    {
        // generated: LeaseState
        Active = 1,
        Parked = 2,
        Hibernated = 3,
        // end of LeaseState
    }

    /// <summary>Partial: only a part of the VRAM can be released by the deadline.</summary>
    public enum LeaseDecision
    {
        // generated: LeaseDecision
        Granted = 1,
        Partial = 2,
        // end of LeaseDecision
    }

    /// <summary>What is done while a model is loaded.</summary>
    public enum LoadingStage
    {
        // generated: LoadingStage
        Read = 1,
        Profile = 2,
        Fill = 3,
        // end of LoadingStage
    }

    public enum NoticeKind
    {
        // generated: NoticeKind
        Wants = 1,
        GivesBack = 2,
        Late = 3,
        Pressure = 4,
        OtherProcess = 5,
        State = 6,
        Http = 7,
        HostPressure = 8,
        // end of NoticeKind
    }

    /// <summary>How the GPU is shared with frames. PrioritizeGraphics: the sidecar uses only the GPU time that frames
    /// leave free. Balance: more, as long as frames stay within their target time. PrioritizeCompute: it ignores
    /// frames.</summary>
    public enum SchedulingMode
    {
        // generated: SchedulingMode
        PrioritizeGraphics = 1,
        Balance = 2,
        PrioritizeCompute = 3,
        // end of SchedulingMode
    }

    /// <summary>A finished answer.</summary>
    public sealed class Completion
    {
        public string Text { get; internal set; }
        public StopReason Reason { get; internal set; }
        public uint NPrompt { get; internal set; }
        public uint NGenerated { get; internal set; }
        /// <summary>Number of prompt tokens that were already in the KV cache.</summary>
        public ulong NReused { get; internal set; }
        /// <summary>Number of tokens that still fit into the context behind prompt and answer.</summary>
        public ulong NLeft { get; internal set; }
        /// <summary>True if the server of <see cref="LaunchOptions.Fallback"/> has ended the answer. The numbers of
        /// tokens are those that it reports, if it does.</summary>
        public bool Remote { get; internal set; }
        /// <summary>How many of the conversation's oldest questions, with their answers, were not in the prompt because
        /// the context is full.</summary>
        public ulong NDropped { get; internal set; }
        /// <summary>Number of the tokens in NGenerated that the model thought.</summary>
        public ulong NThought { get; internal set; }
        /// <summary>Seed of the random numbers: <see cref="Sampling.Seed"/>, or the one that the sidecar
        /// chose.</summary>
        public uint Seed { get; internal set; }
        public double PrefillSeconds { get; internal set; }
        public double DecodeSeconds { get; internal set; }
    }

    /// <summary>A lease that the game proposes. Null means the default.</summary>
    public sealed class Lease
    {
        // generated: fs_lease
        /// <summary>`parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no
        /// VRAM is used.</summary>
        public LeaseState State = LeaseState.Active;
        /// <summary>Limit for all VRAM that the sidecar uses; 0: no limit. If `State` is not `active`: the budget to
        /// use once it is active again. In MiB.</summary>
        public double VramBudgetMb;
        /// <summary>The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does
        /// not. In MiB.</summary>
        public double FloorMb;
        /// <summary>Version of the lease. It is refused with `stale_lease` unless it is higher than the version in
        /// force; 0: never refused for its version.</summary>
        public ulong Version;
        /// <summary>Time that the sidecar has to release the VRAM above the budget. Default 5.0.</summary>
        public double? TimeoutSeconds;
        /// <summary>Text for the sidecar's log.</summary>
        public string Reason;
        /// <summary>Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the
        /// limit in force stays. In MiB.</summary>
        public double? HostBudgetMb;
        // end of fs_lease
    }

    /// <summary>The sidecar's answers to a proposed lease. The tasks end in this order, or with a
    /// <see cref="FrameshardException"/>. They are never cancelled.</summary>
    public sealed class LeaseChange
    {
        internal readonly TaskCompletionSource<LeaseAnswer> Decision = new TaskCompletionSource<LeaseAnswer>();
        internal readonly TaskCompletionSource<BudgetResult> Release = new TaskCompletionSource<BudgetResult>();
        internal readonly TaskCompletionSource<Observation> Observation = new TaskCompletionSource<Observation>();

        /// <summary>The decision about the lease. It comes before any VRAM is released.</summary>
        public Task<LeaseAnswer> Decided => Decision.Task;

        /// <summary>Ends when the VRAM above the budget is released.</summary>
        public Task<BudgetResult> Released => Release.Task;

        /// <summary>The VRAM that the driver counts after the release. It may come some time later.</summary>
        public Task<Observation> Observed => Observation.Task;
    }

    public sealed class LeaseAnswer
    {
        public LeaseDecision Decision { get; internal set; }
        /// <summary>Budget that will be reached by the deadline; 0: no limit.</summary>
        public ulong BudgetBytes { get; internal set; }
        /// <summary>Predicted time until the release is complete.</summary>
        public double Seconds { get; internal set; }
        /// <summary>Version of the lease in force.</summary>
        public ulong Version { get; internal set; }
        /// <summary>Host budget that will be reached by the deadline; 0: no limit.</summary>
        public ulong HostBudgetBytes { get; internal set; }
    }

    /// <summary>A VRAM budget that is in force.</summary>
    public sealed class BudgetResult
    {
        public ulong BudgetBytes { get; internal set; }
        /// <summary>VRAM that the sidecar uses, by its own exact count.</summary>
        public ulong UsedBytes { get; internal set; }
        /// <summary>Time since the engine was asked.</summary>
        public double Seconds { get; internal set; }
        /// <summary>Host budget in force; 0: no limit.</summary>
        public ulong HostBudgetBytes { get; internal set; }
        /// <summary>Host memory that the sidecar uses, by its own count.</summary>
        public ulong HostUsedBytes { get; internal set; }
    }

    public sealed class Observation
    {
        /// <summary>VRAM of the engine process as the driver counts it; null if the driver does not report
        /// it.</summary>
        public long? Bytes { get; internal set; }
        public double Seconds { get; internal set; }
        /// <summary>Host memory of the sidecar's processes as the system counts it; null if it was not
        /// measured.</summary>
        public long? HostObservedBytes { get; internal set; }
    }

    /// <summary>The lease in force, the floors and the memory in use. BudgetBytes and HostBudgetBytes are 0 if there is
    /// no limit.</summary>
    public sealed class Budget
    {
        public LeaseState State { get; internal set; }
        public ulong Version { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
        public ulong FullBytes { get; internal set; }
        public ulong UsedBytes { get; internal set; }
        /// <summary>VRAM that the sidecar would like to have.</summary>
        public ulong WantedBytes { get; internal set; }
        public ulong HostBudgetBytes { get; internal set; }
        public ulong HostFloorBytes { get; internal set; }
        public ulong HostUsedBytes { get; internal set; }
    }

    /// <summary>How far the model is loaded, for a progress bar.</summary>
    public sealed class Loading
    {
        public LoadingStage Stage { get; internal set; }
        public uint Done { get; internal set; }
        /// <summary>MiB of the model file, steps of the profile, or MiB of weights to copy.</summary>
        public uint Total { get; internal set; }
    }

    /// <summary>News about memory and the lease; PROTOCOL.md ("The lease") describes the kinds.</summary>
    public sealed class Notice
    {
        public NoticeKind Kind { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public double Seconds { get; internal set; }
        /// <summary>A text for a log.</summary>
        public string Text { get; internal set; }
        /// <summary>For HostPressure: the sidecar's own limit for its host memory; 0: the pressure is over.</summary>
        public ulong HostBudgetBytes { get; internal set; }
    }

    /// <summary>Memory of the device and of the machine, and what the model needs. Totals and free bytes are null if
    /// the system does not report them.</summary>
    public sealed class Caps
    {
        public string Device { get; internal set; }
        public long? TotalBytes { get; internal set; }
        public long? FreeBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
        public ulong FullBytes { get; internal set; }
        public long? HostTotalBytes { get; internal set; }
        public long? HostFreeBytes { get; internal set; }
        public ulong HostFloorBytes { get; internal set; }
        /// <summary>The whole answer, a JSON object.</summary>
        public string DetailJson { get; internal set; }
    }

    /// <summary>The LoRA adapters that are loaded.</summary>
    public sealed class LoadedAdapters
    {
        /// <summary>The smallest VRAM budget with these adapters.</summary>
        public ulong FloorBytes { get; internal set; }
        /// <summary>A JSON object: {"adapters": [{"name": ..., "size_bytes": ...}, ...]}.</summary>
        public string DetailJson { get; internal set; }
    }

    /// <summary>Predictions at one VRAM budget. All are 0 if the budget is below the floor (Fits is false).</summary>
    public sealed class Plan
    {
        public ulong BudgetBytes { get; internal set; }
        public bool Fits { get; internal set; }
        public double FirstTokenSeconds { get; internal set; }
        public double TokensPerSecond { get; internal set; }
        public ulong ResidentBytes { get; internal set; }
        public ulong StreamedBytes { get; internal set; }
        public ulong CpuBytes { get; internal set; }
    }

    /// <summary>Length of a prompt in tokens, and how many tokens still fit into the context behind it.</summary>
    public sealed class TokenCount
    {
        public ulong NTokens { get; internal set; }
        public ulong NLeft { get; internal set; }
    }

    /// <summary>Embeddings of texts, in their order.</summary>
    public sealed class Embeddings
    {
        /// <summary>Number of dimensions: the length of each row.</summary>
        public ulong NDim { get; internal set; }
        /// <summary>One row for each text. The squares of a row add up to 1.</summary>
        public float[][] Rows { get; internal set; }
        /// <summary>Number of tokens that the encoder has read for all texts; 0: an older sidecar, which does not
        /// tell.</summary>
        public ulong NTokens { get; internal set; }
    }

    /// <summary>The loaded model.</summary>
    public sealed class ModelInfo
    {
        public string Name { get; internal set; }
        public string Arch { get; internal set; }
        public string Device { get; internal set; }
        public uint NCtx { get; internal set; }
        public uint NParallel { get; internal set; }
        public uint NVocab { get; internal set; }
        public uint NLayer { get; internal set; }
        public bool Chat { get; internal set; }
        public ulong FloorBytes { get; internal set; }
        public ulong FullBytes { get; internal set; }
        public string PlanJson { get; internal set; }
        public ulong Pid { get; internal set; }
        public string ConnectFile { get; internal set; }
        /// <summary>Name of the vision tower; "" if the model has none.</summary>
        public string Vision { get; internal set; }
        /// <summary>SHA-256 that tells model files apart, in hex; "": not known.</summary>
        public string Fingerprint { get; internal set; }
        /// <summary>SHA-256 of the chat template, in hex; "": none, or not known.</summary>
        public string TemplateFingerprint { get; internal set; }
        /// <summary>Base URL of OpenAI's HTTP interface; "" unless LaunchOptions.Http is set.</summary>
        public string HttpUrl { get; internal set; }
        /// <summary>Key for HTTP requests (`Authorization: Bearer`). Keep it secret.</summary>
        public string HttpKey { get; internal set; }
        /// <summary>Name of the sentence encoder's file; empty if there is none.</summary>
        public string Embedder { get; internal set; }
        /// <summary>True if it can think before it answers: <see cref="JobOptions.Thinking"/>.</summary>
        public bool Thinks { get; internal set; }
        /// <summary>Why better devices than <see cref="Device"/> were not taken, on a line each; empty: the best was
        /// taken, or the launch named it.</summary>
        public string PassedOver { get; internal set; }
        /// <summary>True if jobs may have images.</summary>
        public bool Sees { get; internal set; }
        /// <summary>True if jobs may have sounds, in the place of images.</summary>
        public bool Hears { get; internal set; }
    }

    /// <summary>What <see cref="Sidecar.SaveKvAsync"/> has written or <see cref="Sidecar.LoadKvAsync"/> has
    /// read.</summary>
    public sealed class KvResult
    {
        /// <summary>Tokens of the KV cache; 0: none, and the text is read anew.</summary>
        public ulong NTokens { get; internal set; }
        public ulong FileBytes { get; internal set; }
        /// <summary>Why NTokens is 0; else empty.</summary>
        public string Detail { get; internal set; }
    }

    /// <summary>What <see cref="Sidecar.Load"/> has found. The texts of the save are loaded in any case.</summary>
    public sealed class LoadResult
    {
        /// <summary>True if the save was made with the loaded model. Another model gives other answers.</summary>
        public bool SameModel { get; internal set; }
        /// <summary>True if it was made with the same chat template.</summary>
        public bool SameTemplate { get; internal set; }
    }

    /// <summary>A new state of the engine process. After a restart, jobs continue on their own.</summary>
    public sealed class EngineChange
    {
        public EngineState State { get; internal set; }
        public uint Restarts { get; internal set; }
        /// <summary>Why the engine is off; null otherwise.</summary>
        public FrameshardException Error { get; internal set; }
    }
}
