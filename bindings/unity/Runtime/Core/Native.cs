// P/Invoke declarations of frameshard.h. Structs are blittable and there are no callbacks, so that IL2CPP works too.

using System;
using System.Runtime.InteropServices;

namespace Frameshard
{
    /// <summary>Owns an fs_client. The runtime counts running calls, so the client is never freed during a
    /// call.</summary>
    internal sealed class ClientHandle : SafeHandle
    {
        // In the finalizer, too: a sidecar that is killed leaves its connect file.
        private const double LeaveSeconds = 1.0;

        public ClientHandle() : base(IntPtr.Zero, true) { }

        public override bool IsInvalid => handle == IntPtr.Zero;

        protected override bool ReleaseHandle()
        {
            Native.fs_close(handle, LeaveSeconds);
            return true;
        }
    }

    /// <summary>Owns an fs_frame_block.</summary>
    internal sealed class FrameBlockHandle : SafeHandle
    {
        public FrameBlockHandle() : base(IntPtr.Zero, true) { }

        public override bool IsInvalid => handle == IntPtr.Zero;

        protected override bool ReleaseHandle()
        {
            Native.fs_frame_block_close(handle);
            return true;
        }
    }

    internal static class Native
    {
        internal const uint AbiVersion = 2;

        // On iOS, Unity links plugins into the program itself.
#if UNITY_IOS && !UNITY_EDITOR
        private const string Library = "__Internal";
#else
        private const string Library = "frameshard";
#endif

        internal enum EventType : uint
        {
            Ready = 1, Started = 2, Text = 3, Done = 4, Failed = 5, Cancelled = 6, BudgetReleased = 7,
            BudgetObserved = 8, Budget = 9, Stats = 10, Refused = 11, Engine = 12, Closed = 13, Lease = 14, Notice = 15,
            Caps = 16, Plan = 17, FrameBlock = 18, Progress = 19, Loading = 20, Adapters = 21, Kv = 22, Paused = 23,
            Resumed = 24, TokenCount = 25, Embeddings = 26, Thought = 27, ToolCall = 28,
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct LaunchOptions
        {
            // generated: fs_launch_options
            internal uint StructSize;
            internal IntPtr Model;
            internal IntPtr Device;
            internal ulong VramBudgetBytes;
            internal uint NCtx;
            internal uint NParallel;
            internal uint NUbatch;
            internal uint NThreads;
            internal double SilentS;
            internal IntPtr Transport;
            internal IntPtr Endpoint;
            internal IntPtr ConnectFile;
            internal IntPtr Python;
            internal IntPtr LogFile;
            internal IntPtr ClientName;
            internal IntPtr ExtraJson;
            internal IntPtr Mmproj;
            internal IntPtr Mode;
            internal IntPtr Speculate;
            internal IntPtr DraftModel;
            internal IntPtr KvType;
            internal ulong MaxJobs;
            internal ulong MaxClientJobs;
            internal ulong HeldBytes;
            internal double HangIdleS;
            internal double HangBusyS;
            internal double HangLoadS;
            internal double HangStillS;
            internal ulong RestartLimit;
            internal double RestartWindowS;
            internal double OffPauseS;
            internal double OffPauseMaxS;
            internal ulong KvCacheBytes;
            internal IntPtr Loading;
            internal ulong NAdapters;
            internal IntPtr Adapters;
            internal IntPtr Http;
            internal IntPtr HttpKey;
            internal IntPtr Embedder;
            internal IntPtr Fallback;
            internal IntPtr FallbackModel;
            internal IntPtr FallbackKeyFile;
            internal IntPtr FallbackKeyEnv;
            internal IntPtr FallbackHttp;
            internal ulong HostBudgetBytes;
            // end of fs_launch_options
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Model
        {
            internal uint StructSize;
            internal uint NCtx;
            internal uint NParallel;
            internal uint NVocab;
            internal uint NLayer;
            internal int Chat;
            internal ulong FloorBytes;
            internal ulong FullBytes;
            internal IntPtr Name;
            internal IntPtr Arch;
            internal IntPtr Device;
            internal IntPtr PlanJson;
            internal ulong Pid;
            internal IntPtr ConnectFile;
            internal IntPtr Vision;
            internal IntPtr Fingerprint;
            internal IntPtr TemplateFingerprint;
            internal IntPtr HttpUrl;
            internal IntPtr HttpKey;
            internal IntPtr Embedder;
            internal ulong Thinks;
            internal IntPtr PassedOver;
            internal ulong Sees;
            internal ulong Hears;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct LoadResult
        {
            internal uint StructSize;
            internal int SameModel;
            internal int SameTemplate;
            internal int Reserved;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct LogitBias
        {
            internal IntPtr Text;
            internal long Token;
            internal double Bias;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Sampling
        {
            // generated: fs_sampling
            internal uint StructSize;
            internal int MaxTokens;
            internal int TopK;
            internal uint NStop;
            internal double Temperature;
            internal double TopP;
            internal double MinP;
            internal double RepeatPenalty;
            internal long Seed;
            internal IntPtr Stop;
            internal IntPtr JsonSchema;
            internal double FrequencyPenalty;
            internal double PresencePenalty;
            internal double TypicalP;
            internal double XtcProbability;
            internal double XtcThreshold;
            internal ulong NChoices;
            internal IntPtr Choices;
            internal IntPtr Regex;
            internal IntPtr Lark;
            internal ulong NLogitBias;
            internal IntPtr LogitBias;
            internal double DryMultiplier;
            internal double DryBase;
            internal ulong DryAllowedLength;
            internal long DryPenaltyLastN;
            internal ulong NDrySequenceBreakers;
            internal IntPtr DrySequenceBreakers;
            // end of fs_sampling
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct JobOptions
        {
            internal uint StructSize;
            internal uint Window;
            internal IntPtr Conversation;
            internal IntPtr System;
            internal IntPtr Sampling;
            internal ulong Timeline;
            internal IntPtr Images;
            internal uint NImages;
            internal uint Priority;
            internal ulong Sentences;
            internal ulong WarmUp;
            internal IntPtr Adapters;
            internal ulong NAdapters;
            internal ulong DeadlineMs;
            internal IntPtr Thinking;
            internal ulong ThinkingTokens;
            internal IntPtr TemplateKeywords;
            internal ulong LocalOnly;
            internal IntPtr Tools;
            internal ulong NTools;
            internal IntPtr ToolChoice;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Tool
        {
            internal IntPtr Name;
            internal IntPtr Description;
            internal IntPtr Schema;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct ToolResult
        {
            internal IntPtr CallId;
            internal IntPtr Content;
            internal int ContentLength;
            internal int Reserved;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Adapter
        {
            internal IntPtr Name;
            internal double Scale;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Image
        {
            internal uint Format;
            internal uint Width;
            internal uint Height;
            internal uint Stride;
            internal IntPtr Data;
            internal ulong Size;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct ToolCall
        {
            internal IntPtr CallId;
            internal IntPtr Name;
            internal IntPtr Arguments;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct ChatMessage
        {
            internal IntPtr Role;
            internal IntPtr Content;
            internal int ContentLength;
            internal uint NToolCalls;
            internal IntPtr ToolCalls;
            internal IntPtr ToolCallId;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Lease
        {
            // generated: fs_lease
            internal uint StructSize;
            internal int State;
            internal ulong VramBudgetBytes;
            internal ulong FloorBytes;
            internal ulong Version;
            internal double TimeoutS;
            internal IntPtr Reason;
            internal long HostBudgetBytes;
            // end of fs_lease
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct FrameAnswer
        {
            internal uint StructSize;
            internal uint Reserved;
            internal ulong AppliedGeneration;
            internal ulong RefusedGeneration;
            internal ulong BudgetBytes;
            internal ulong UsedBytes;
            internal ulong FloorBytes;
        }

        [StructLayout(LayoutKind.Sequential)]
        internal struct Event
        {
            // generated: fs_event
            internal EventType Type;
            internal int Status;
            internal ulong Job;
            internal ulong Request;
            internal ulong Timeline;
            internal IntPtr Text;
            internal IntPtr Detail;
            internal uint TextLength;
            internal uint DetailLength;
            internal uint Tokens;
            internal uint Reason;
            internal uint NPrompt;
            internal uint NGenerated;
            internal uint EngineState;
            internal uint Restarts;
            internal ulong BudgetBytes;
            internal ulong UsedBytes;
            internal ulong FloorBytes;
            internal ulong FullBytes;
            internal long ObservedBytes;
            internal double Seconds;
            internal double PrefillS;
            internal double DecodeS;
            internal uint Decision;
            internal uint LeaseState;
            internal uint Notice;
            internal int Fits;
            internal ulong Version;
            internal ulong WantedBytes;
            internal long TotalBytes;
            internal long FreeBytes;
            internal double TtftS;
            internal double TokensPerSecond;
            internal ulong ResidentBytes;
            internal ulong StreamedBytes;
            internal ulong CpuBytes;
            internal uint Phase;
            internal uint Done;
            internal uint Total;
            internal uint Reserved;
            internal ulong Seed;
            internal ulong NReused;
            internal ulong SentenceEnd;
            internal ulong Stage;
            internal ulong NTokens;
            internal ulong FileBytes;
            internal ulong NLeft;
            internal ulong NDropped;
            internal ulong NDim;
            internal ulong NRows;
            internal IntPtr Rows;
            internal ulong NThought;
            internal ulong Remote;
            internal IntPtr CallId;
            internal IntPtr Name;
            internal ulong HostBudgetBytes;
            internal ulong HostUsedBytes;
            internal long HostObservedBytes;
            internal ulong HostFloorBytes;
            internal long HostTotalBytes;
            internal long HostFreeBytes;
            // end of fs_event
        }

        [DllImport(Library)] internal static extern IntPtr fs_last_error(out uint length);
        [DllImport(Library)] internal static extern uint fs_abi_version();
        [DllImport(Library)] internal static extern void fs_launch_options_init(out LaunchOptions options, uint size);
        [DllImport(Library)] internal static extern int fs_launch(ref LaunchOptions options, out ClientHandle client);
        [DllImport(Library)] internal static extern int fs_connect(IntPtr file, IntPtr name, out ClientHandle client);
        [DllImport(Library)] internal static extern void fs_close(IntPtr client, double timeout);
        [DllImport(Library)] internal static extern int fs_has_feature(ClientHandle client, IntPtr feature);
        [DllImport(Library)] internal static extern int fs_get_model(ClientHandle client, ref Model model);
        [DllImport(Library)] internal static extern void fs_sampling_init(out Sampling sampling, uint size);
        [DllImport(Library)] internal static extern void fs_job_options_init(out JobOptions options, uint size);
        [DllImport(Library)]
        internal static extern int fs_ask(ClientHandle client, IntPtr text, int length, ref JobOptions options, out ulong job);
        [DllImport(Library)]
        internal static extern int fs_tool_results(
            ClientHandle client, [In] ToolResult[] results, uint count, ref JobOptions options, out ulong job);
        [DllImport(Library)]
        internal static extern int fs_chat_with_tools(
            ClientHandle client, [In] ChatMessage[] messages, uint count, ref JobOptions options, out ulong job);
        [DllImport(Library)]
        internal static extern int fs_complete(
            ClientHandle client, IntPtr prompt, int length, ref JobOptions options, out ulong job);
        [DllImport(Library)] internal static extern int fs_cancel(ClientHandle client, ulong job);
        [DllImport(Library)]
        internal static extern int fs_history_with_tools(
            ClientHandle client, IntPtr conversation, out IntPtr messages, out uint count);
        [DllImport(Library)]
        internal static extern int fs_set_priority(ClientHandle client, ulong job, uint priority);
        [DllImport(Library)] internal static extern int fs_forget(ClientHandle client, IntPtr conversation);
        [DllImport(Library)]
        internal static extern int fs_save(ClientHandle client, IntPtr conversation, out IntPtr data, out ulong size);
        [DllImport(Library)]
        internal static extern int fs_load(
            ClientHandle client, [In] byte[] data, ulong size, IntPtr conversation, ref LoadResult result);
        [DllImport(Library)]
        internal static extern int fs_save_kv(
            ClientHandle client, IntPtr conversation, IntPtr path, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_load_kv(
            ClientHandle client, IntPtr path, IntPtr conversation, out ulong request);
        [DllImport(Library)] internal static extern void fs_lease_init(out Lease lease, uint size);
        [DllImport(Library)]
        internal static extern int fs_set_lease(ClientHandle client, ref Lease lease, out ulong request);
        [DllImport(Library)] internal static extern int fs_get_budget(ClientHandle client, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_load_adapter(ClientHandle client, IntPtr name, IntPtr path, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_unload_adapter(ClientHandle client, IntPtr name, out ulong request);
        [DllImport(Library)] internal static extern int fs_get_stats(ClientHandle client, out ulong request);
        [DllImport(Library)] internal static extern int fs_get_caps(ClientHandle client, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_get_plan(ClientHandle client, ulong bytes, uint promptTokens, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_count_tokens(ClientHandle client, IntPtr prompt, int length, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_count_chat_tokens_with_tools(
            ClientHandle client, [In] ChatMessage[] messages, uint count, IntPtr tools, uint nTools, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_embed(
            ClientHandle client, [In] IntPtr[] texts, [In] int[] lengths, uint count, out ulong request);
        [DllImport(Library)] internal static extern int fs_shutdown(ClientHandle client);
        [DllImport(Library)]
        internal static extern int fs_set_pacing(ClientHandle client, int mode, double rate, out ulong request);
        [DllImport(Library)] internal static extern int fs_get_frame_block(ClientHandle client, out ulong request);
        [DllImport(Library)]
        internal static extern int fs_frame_block_open(IntPtr path, double targetFrame, out FrameBlockHandle block);
        [DllImport(Library)] internal static extern void fs_frame_block_close(IntPtr block);
        [DllImport(Library)] internal static extern int fs_frame_begin(FrameBlockHandle block);
        [DllImport(Library)] internal static extern int fs_frame_end(FrameBlockHandle block, double gpuBusy);
        [DllImport(Library)] internal static extern int fs_frame_idle(FrameBlockHandle block);
        [DllImport(Library)]
        internal static extern int fs_frame_set_budget(FrameBlockHandle block, ulong bytes, out ulong generation);
        [DllImport(Library)]
        internal static extern int fs_frame_get_answer(FrameBlockHandle block, ref FrameAnswer answer);
        [DllImport(Library)]
        internal static extern int fs_poll(ClientHandle client, [Out] Event[] events, uint eventSize, int capacity);
        [DllImport(Library)] internal static extern int fs_wait(ClientHandle client, double timeout);
    }
}
