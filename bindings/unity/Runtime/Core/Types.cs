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

    /// <summary>How to start a sidecar. What is null or not set has the default of frameshard.h.</summary>
    public sealed class LaunchOptions
    {
        /// <summary>Path of a GGUF file; the only value without a default.</summary>
        public string Model;
        /// <summary>Path of a GGUF file that reads images for the model.</summary>
        public string Mmproj;
        /// <summary>"auto" (first GPU, else CPU), "cpu", "emulated", or a name such as "CUDA0".</summary>
        public string Device;
        /// <summary>All that the sidecar may hold in VRAM, in MiB; 0: no limit.</summary>
        public double VramBudgetMb;
        /// <summary>"planned" (default), or "stream_only": the same bits at any budget, at the cost of speed.</summary>
        public string Mode;
        /// <summary>Tokens of context of each conversation; <see cref="NParallel"/> of them run at a time.</summary>
        public uint? NCtx;
        public uint? NParallel;
        public uint? NUbatch;
        public uint? NThreads;
        public double? SilentSeconds;
        public string Transport;
        public string Endpoint;
        public string ConnectFile;
        /// <summary>Python in which frameshard is installed; "python3" by default.</summary>
        public string Python;
        /// <summary>The sidecar appends its log here; the game's standard error by default.</summary>
        public string LogFile;
        public string ClientName = "csharp";
        /// <summary>Further fields of the sidecar's first line, a JSON object; they win.</summary>
        public string ExtraJson;
    }

    /// <summary>How tokens are chosen. What is null has the protocol's default.</summary>
    public sealed class Sampling
    {
        public int? MaxTokens;
        public double? Temperature;
        public int? TopK;
        public double? TopP;
        public double? MinP;
        public double? RepeatPenalty;
        public uint? Seed;
        public string[] Stop;
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
    public enum ImageFormat { Encoded = 1, Rgb = 2, Rgba = 3 }

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
    public enum Phase { Encode = 1, Prefill = 2 }

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
    public enum StopReason { Stop = 1, Length = 2 }

    public enum EngineState { Loading = 1, Ready = 2, Restarting = 3, Off = 4, Hibernated = 5 }

    /// <summary>Parked: only the driver's context is left in VRAM. Hibernated: nothing is, the engine has ended.</summary>
    public enum LeaseState { Active = 1, Parked = 2, Hibernated = 3 }

    /// <summary>Partial: by the deadline only a part of what was asked for.</summary>
    public enum LeaseDecision { Granted = 1, Partial = 2 }

    public enum NoticeKind { Wants = 1, GivesBack = 2, Late = 3, Pressure = 4, OtherProcess = 5, State = 6 }

    /// <summary>Whose work on the GPU comes first.</summary>
    public enum SchedulingMode { PrioritizeGraphics = 1, Balance = 2, PrioritizeCompute = 3 }

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

    /// <summary>What the game proposes. What is null has the default of frameshard.h.</summary>
    public sealed class Lease
    {
        /// <summary>All that the sidecar holds in VRAM has to fit, in MiB; 0: no limit.</summary>
        public double VramBudgetMb;
        public LeaseState State = LeaseState.Active;
        /// <summary>Kept while the sidecar is idle, in MiB; 0: it gives nothing back on its own.</summary>
        public double FloorMb;
        /// <summary>A lease whose version is not above that in force is refused; 0: the last word counts.</summary>
        public ulong Version;
        /// <summary>Deadline of the release.</summary>
        public double? TimeoutSeconds;
        /// <summary>For logs.</summary>
        public string Reason;
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
