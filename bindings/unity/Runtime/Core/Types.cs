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

    /// <summary>What went wrong, and what to do about it in <see cref="Exception.Message"/>.</summary>
    public sealed class FrameshardException : Exception
    {
        public ErrorCode Code { get; }

        /// <summary>The protocol's name, such as "budget_below_floor".</summary>
        public string Name { get; }

        /// <summary>The same call may succeed later without a change.</summary>
        public bool Retriable { get; }

        /// <summary>Figures, such as floor_bytes, as a JSON object; "" if there are none.</summary>
        public string DetailJson { get; }

        public FrameshardException(ErrorCode code, string message, string detailJson = "") : base(message)
        {
            Code = code;
            Name = Utf8.Read(Native.fs_status_name((int)code));
            Retriable = Native.fs_status_retriable((int)code) != 0;
            DetailJson = detailJson;
        }
    }

    /// <summary>How to start a sidecar. Null is the default of frameshard.h.</summary>
    public sealed class LaunchOptions
    {
        // generated: fs_launch_options
        /// <summary>Path of a GGUF file; the only option without a default.</summary>
        public string Model;
        /// <summary>`auto` (the first GPU, else the CPU), `cpu`, `emulated`, or a ggml device such as `CUDA0`. For
        /// tests: `emulated:25` copies 25e9 bytes/s at most. Default auto.</summary>
        public string Device;
        /// <summary>All that the sidecar may hold in VRAM; 0: no limit. In MiB.</summary>
        public double VramBudgetMb;
        /// <summary>Context of each conversation, rounded up to a multiple of 256; VRAM is taken for the tokens in use.
        /// Default 4096.</summary>
        public uint? NCtx;
        /// <summary>Jobs that run at once, each in a context of its own. Default 4.</summary>
        public uint? NParallel;
        /// <summary>Tokens of a prompt that are computed at once. Streamed weights are copied once for each so many,
        /// and the buffers for them are part of the floor. 0: chosen at launch, for the least time of a long prompt and
        /// the first 16 tokens of its answer, with a floor of about half of the budget at most (or that of 512, if it
        /// is higher); without a budget 512. Default 512.</summary>
        public uint? NUbatch;
        /// <summary>CPU threads; 0: half of the CPUs.</summary>
        public uint? NThreads;
        /// <summary>A client whose connection is gone and that does not come back for so long loses its jobs. One that
        /// is connected and silent (a breakpoint, a long load) keeps them. Default 10.0.</summary>
        public double? SilentSeconds;
        /// <summary>How clients connect: `ipc`, or `tcp` on the loopback (the default on Windows). Both are encrypted.
        /// One of ipc, tcp.</summary>
        public string Transport;
        /// <summary>Where to listen: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, a fresh place.</summary>
        public string Endpoint;
        /// <summary>Where to leave what further clients need to connect, readable by this user only; without it, a
        /// fresh place. Refused with `bad_argument` where it cannot be written.</summary>
        public string ConnectFile;
        /// <summary>Python in which frameshard is installed. Default python3, from PATH.</summary>
        public string Python;
        /// <summary>The sidecar appends its log here. Default: standard error.</summary>
        public string LogFile;
        /// <summary>At most 64 bytes, for the sidecar's log. Default c.</summary>
        public string ClientName = "csharp";
        /// <summary>A JSON object with further fields of the sidecar's first line; they win. Default: none.</summary>
        public string ExtraJson;
        /// <summary>Path of the GGUF file that reads images for this model; empty: none.</summary>
        public string Mmproj;
        /// <summary>`stream_only`: the same bits at any budget, at the cost of speed. One of planned, stream_only.
        /// Default planned.</summary>
        public string Mode;
        /// <summary>Speculative decoding: `auto` drafts repeated text by lookup and verifies several tokens at a time
        /// where that pays; `off`: never. One of auto, off. Default auto.</summary>
        public string Speculate;
        /// <summary>Path of the GGUF file of a small model with the same vocabulary (empty: none), which drafts what
        /// does not repeat, where that pays. It runs on the CPU, with its weights and its KV cache (16,384 tokens at
        /// most) in host memory. Not loaded where nothing can be drafted: with `speculate` off, on the CPU alone or
        /// with recurrent models.</summary>
        public string DraftModel;
        /// <summary>Type of the KV cache: `q8_0` takes half, `q4_0` little more than a quarter of the bytes of `f16`,
        /// at some loss. Refused with `unsupported` where the model's heads are no multiple of 32. The floor is not
        /// lower by it on NVIDIA's GPUs, where prompts have a layer's whole context in 16 bits beside it. One of f16,
        /// q8_0, q4_0. Default f16.</summary>
        public string KvType;
        /// <summary>Jobs of all clients that have not ended. Default 256.</summary>
        public ulong? MaxJobs;
        /// <summary>Jobs of one client that have not ended. Default 64.</summary>
        public ulong? MaxClientJobs;
        /// <summary>Text kept for one job whose client does not read; beyond, the job fails. Default 49152.</summary>
        public ulong? HeldBytes;
        /// <summary>An engine without work that does not answer for so long is replaced. Default 5.0.</summary>
        public double? HangIdleSeconds;
        /// <summary>An engine with work that does not answer for so long is replaced. Default 60.0.</summary>
        public double? HangBusySeconds;
        /// <summary>An engine that loads and does not answer for so long is replaced. Default 600.0.</summary>
        public double? HangLoadSeconds;
        /// <summary>An engine of which no thread runs for so long is stopped, and replaced whatever it does. Default
        /// 5.0.</summary>
        public double? HangStillSeconds;
        /// <summary>Deaths of the engine within `restart_window_s`, without a new token in between and while no job
        /// runs, after which it is off for `off_pause_s`. Default 3.</summary>
        public ulong? RestartLimit;
        /// <summary>Span of time for `restart_limit`. Default 300.0.</summary>
        public double? RestartWindowSeconds;
        /// <summary>Pause of an engine that cannot be kept alive; then it is tried again. Each is twice as long as the
        /// last. Default 1.0.</summary>
        public double? OffPauseSeconds;
        /// <summary>The longest such pause. Default 60.0.</summary>
        public double? OffPauseMaxSeconds;
        // end of fs_launch_options
    }

    /// <summary>How tokens are chosen. Null is the protocol's default. In mode "stream_only" the same values, prompt and
    /// seed give the same text.</summary>
    public sealed class Sampling
    {
        // generated: fs_sampling
        /// <summary>Length of the answer at most. Default 256.</summary>
        public int? MaxTokens;
        /// <summary>Only so many of the likeliest tokens; 0: off. Default 40.</summary>
        public int? TopK;
        /// <summary>Randomness of the choice; 0: always the likeliest token. Default 0.8.</summary>
        public double? Temperature;
        /// <summary>Only the likeliest tokens of so much probability; 1: off. Default 0.95.</summary>
        public double? TopP;
        /// <summary>Only tokens of at least this share of the likeliest one's probability; 0: off. Default
        /// 0.05.</summary>
        public double? MinP;
        /// <summary>Makes tokens of the last ones less likely; 1: off. Default 1.0.</summary>
        public double? RepeatPenalty;
        /// <summary>Seed of the random numbers; without it the sidecar draws one.</summary>
        public uint? Seed;
        /// <summary>The answer ends before any of these.</summary>
        public string[] Stop;
        /// <summary>A JSON schema: the answer is JSON that fits it, unless `max_tokens` or `stop` ends it before;
        /// empty: off.</summary>
        public string JsonSchema;
        /// <summary>Taken from a token's logit for each time that it is among the last 64; 0: off.</summary>
        public double? FrequencyPenalty;
        /// <summary>Taken from a token's logit once if it is among the last 64; 0: off.</summary>
        public double? PresencePenalty;
        // end of fs_sampling
    }

    /// <summary>What else a job may be given.</summary>
    public sealed class JobOptions
    {
        /// <summary>What was said under this name before belongs to the prompt.</summary>
        public string Conversation;
        /// <summary>The conversation's persona from now on (Ask only).</summary>
        public string System;
        public Sampling Sampling;
        /// <summary>Stand before the question, for models that see; at most 8.</summary>
        public Image[] Images;
        /// <summary>Comes back with the job: a game that loads a save counts it up.</summary>
        public ulong Timeline;
        public uint? Window;
    }

    /// <summary>Encoded: a PNG or JPEG file. Else rows of pixels from the top, 8 bits a channel.</summary>
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
        /// <summary>In pixels; 0 of an encoded image.</summary>
        public uint Width;
        public uint Height;
        /// <summary>Bytes from one row to the next; 0: rows follow each other without a gap.</summary>
        public uint Stride;
        public byte[] Data;
    }

    /// <summary>Images are encoded; then the prompt is read.</summary>
    public enum Phase
    {
        // generated: Phase
        Encode = 1,
        Prefill = 2,
        // end of Phase
    }

    /// <summary>How far a job with images is: images, or tokens of the prompt.</summary>
    public struct Progress
    {
        public Phase Phase { get; internal set; }
        public uint Done { get; internal set; }
        public uint Total { get; internal set; }
    }

    /// <summary>One message of a chat; the role is "system", "user" or "assistant".</summary>
    public struct ChatMessage
    {
        public string Role;
        public string Content;

        public ChatMessage(string role, string content)
        {
            Role = role;
            Content = content;
        }
    }

    /// <summary>Stop: the model ended or a stop string came. Length: MaxTokens.</summary>
    public enum StopReason
    {
        // generated: StopReason
        Stop = 1,
        Length = 2,
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

    /// <summary>Parked: only the driver's context is left in VRAM. Hibernated: nothing is, the engine has ended.</summary>
    public enum LeaseState
    {
        // generated: LeaseState
        Active = 1,
        Parked = 2,
        Hibernated = 3,
        // end of LeaseState
    }

    /// <summary>Partial: by the deadline only a part of what was asked for.</summary>
    public enum LeaseDecision
    {
        // generated: LeaseDecision
        Granted = 1,
        Partial = 2,
        // end of LeaseDecision
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
        // end of NoticeKind
    }

    /// <summary>Whose work on the GPU comes first.</summary>
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
        public double PrefillSeconds { get; internal set; }
        public double DecodeSeconds { get; internal set; }
    }

    /// <summary>What the game proposes. Null is the default of frameshard.h.</summary>
    public sealed class Lease
    {
        // generated: fs_lease
        /// <summary>`parked` keeps no more than the driver's context in VRAM, `hibernated` ends the engine
        /// process.</summary>
        public LeaseState State = LeaseState.Active;
        /// <summary>All that the sidecar holds in VRAM has to fit; 0: no limit. Not `active`: the budget to come back
        /// to. In MiB.</summary>
        public double VramBudgetMb;
        /// <summary>What the sidecar keeps while it is idle; 0: it gives nothing back on its own. In MiB.</summary>
        public double FloorMb;
        /// <summary>Refused with `stale_lease` unless it is above the one in force; 0: the last word counts.</summary>
        public ulong Version;
        /// <summary>Deadline of the release. Default 5.0.</summary>
        public double? TimeoutSeconds;
        /// <summary>For the sidecar's log.</summary>
        public string Reason;
        // end of fs_lease
    }

    /// <summary>A proposed lease, on its way. The tasks end in this order, or with a <see cref="FrameshardException"/>;
    /// none is cancelled.</summary>
    public sealed class LeaseChange
    {
        internal readonly TaskCompletionSource<LeaseAnswer> Decision = new TaskCompletionSource<LeaseAnswer>();
        internal readonly TaskCompletionSource<BudgetResult> Release = new TaskCompletionSource<BudgetResult>();
        internal readonly TaskCompletionSource<Observation> Observation = new TaskCompletionSource<Observation>();

        /// <summary>What the sidecar has decided, before it begins.</summary>
        public Task<LeaseAnswer> Decided => Decision.Task;

        /// <summary>The memory is given back.</summary>
        public Task<BudgetResult> Released => Release.Task;

        /// <summary>What the driver counts, which may take a while.</summary>
        public Task<Observation> Observed => Observation.Task;
    }

    public sealed class LeaseAnswer
    {
        public LeaseDecision Decision { get; internal set; }
        /// <summary>Reached by the deadline.</summary>
        public ulong BudgetBytes { get; internal set; }
        /// <summary>Until all of it is reached, as predicted.</summary>
        public double Seconds { get; internal set; }
        /// <summary>Of the lease in force.</summary>
        public ulong Version { get; internal set; }
    }

    /// <summary>A VRAM budget that is in force.</summary>
    public sealed class BudgetResult
    {
        public ulong BudgetBytes { get; internal set; }
        /// <summary>What the sidecar holds, exact by its own count.</summary>
        public ulong UsedBytes { get; internal set; }
        /// <summary>Since the engine was asked.</summary>
        public double Seconds { get; internal set; }
    }

    public sealed class Observation
    {
        /// <summary>What the driver counts for the engine; null where it does not tell.</summary>
        public long? Bytes { get; internal set; }
        public double Seconds { get; internal set; }
    }

    /// <summary>The lease in force and its bounds; a budget of 0 is no limit.</summary>
    public sealed class Budget
    {
        public LeaseState State { get; internal set; }
        public ulong Version { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
        public ulong FullBytes { get; internal set; }
        public ulong UsedBytes { get; internal set; }
        /// <summary>What the sidecar would like to have now.</summary>
        public ulong WantedBytes { get; internal set; }
    }

    /// <summary>What the sidecar says of its memory without being asked.</summary>
    public sealed class Notice
    {
        public NoticeKind Kind { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public double Seconds { get; internal set; }
        /// <summary>A sentence.</summary>
        public string Text { get; internal set; }
    }

    /// <summary>What the device has and what the model needs; null where the system does not tell.</summary>
    public sealed class Caps
    {
        public string Device { get; internal set; }
        public long? TotalBytes { get; internal set; }
        public long? FreeBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
        public ulong FullBytes { get; internal set; }
        /// <summary>All of the answer, a JSON object.</summary>
        public string DetailJson { get; internal set; }
    }

    /// <summary>How fast the model would be at a budget; all figures are 0 where it does not fit.</summary>
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

    /// <summary>What is loaded.</summary>
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
        /// <summary>The name of what reads images; "" where nothing does.</summary>
        public string Vision { get; internal set; }
    }

    /// <summary>The engine process changed its state; jobs go on by themselves after a restart.</summary>
    public sealed class EngineChange
    {
        public EngineState State { get; internal set; }
        public uint Restarts { get; internal set; }
        /// <summary>Why it is off; null otherwise.</summary>
        public FrameshardException Error { get; internal set; }
    }
}
