#pragma once

#include "CoreMinimal.h"
#include "Engine/DeveloperSettings.h"

#include "FrameshardTypes.h"

#include "FrameshardSettings.generated.h"

/** Project settings, under Plugins: the options of the sidecar, and how it shares the GPU with the game. */
UCLASS(Config = Game, DefaultConfig, meta = (DisplayName = "frameshard"))
class FRAMESHARD_API UFrameshardSettings : public UDeveloperSettings
{
	GENERATED_BODY()

public:
	// Model, Mmproj, DraftModel, Embedder and the paths in Adapters may be relative to the project's Content folder,
	// ConnectFile and FallbackKeyFile to its Saved folder.
	// generated: launch options
	/** Path of a GGUF file; the only option without a default. `PATH@OFFSET+SIZE` is a part of a file, such as a
	 * game's pak file; the offset is a multiple of 32. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Model;

	/** `auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device such as
	 * `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Device = TEXT("auto");

	/** Limit for all VRAM that the sidecar uses; 0: no limit. In MiB. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double VramBudgetMb = 2048;

	/** Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only for the
	 * tokens in the context. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1", ClampMax = "16777216"))
	int32 NCtx = 4096;

	/** Number of jobs that run at once, each in its own context. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1", ClampMax = "64"))
	int32 NParallel = 4;

	/** Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once for each
	 * graph, and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has room for
	 * 256 tokens; in mode `stream_only` 512. Any other value holds at every budget, and the floor has room for it. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "65536"))
	int32 NUbatch = 0;

	/** Number of CPU threads; 0: half of the CPUs. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1024"))
	int32 NThreads = 0;

	/** A client that stays disconnected for this long loses its jobs. A client that is connected but silent (a
	 * breakpoint, a long load) keeps them. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double SilentSeconds = 10;

	/** How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are encrypted.
	 * One of ipc, tcp. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Transport;

	/** Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar chooses. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Endpoint;

	/** Path of the file from which other clients learn how to connect; only this user can read it. The sidecar
	 * removes it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it cannot be
	 * written, or if a file is there that is no connect file. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString ConnectFile;

	/** Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty: none. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Mmproj;

	/** `planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every budget. One of
	 * planned, stream_only. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Mode = TEXT("planned");

	/** Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified in one
	 * graph, where that is faster. `off`: never. One of auto, off. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Speculate = TEXT("auto");

	/** Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It drafts text
	 * that does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at most 16,384
	 * tokens) are in host memory. It is not loaded with `Speculate` off, without a GPU, or with recurrent models. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString DraftModel;

	/** Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`, at some
	 * loss of quality. Refused with `unsupported` if the model's attention head size is not a multiple of 32. On
	 * NVIDIA GPUs the floor stays the same, because a prompt also needs one layer's whole context in 16 bits. One
	 * of f16, q8_0, q4_0. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString KvType = TEXT("f16");

	/** Maximum number of unfinished jobs of all clients. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "1", ClampMax = "1024"))
	int32 MaxJobs = 256;

	/** Maximum number of unfinished jobs of one client. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "1", ClampMax = "1024"))
	int32 MaxClientJobs = 64;

	/** Maximum text kept for one job whose client does not read; with more, the job fails. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "49152"))
	int32 HeldBytes = 49152;

	/** An engine without work that does not answer for this long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangIdleSeconds = 5;

	/** An engine with work that does not answer for this long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangBusySeconds = 60;

	/** An engine that loads and does not answer for this long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangLoadSeconds = 600;

	/** An engine in which no thread answers for this long counts as stopped and is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangStillSeconds = 5;

	/** Number of engine deaths within `RestartWindowSeconds` that are followed by a restart; after one more, the
	 * engine is off for `OffPauseSeconds`. Deaths while a job runs do not count, and each new token starts the
	 * count again. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000"))
	int32 RestartLimit = 3;

	/** Time span in which `RestartLimit` counts deaths. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double RestartWindowSeconds = 300;

	/** How long an engine that keeps dying stays off before the next try. Each pause is twice as long as the last. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0.05", ClampMax = "1000000"))
	double OffPauseSeconds = 1;

	/** Maximum length of such a pause. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0.05", ClampMax = "1000000"))
	double OffPauseMaxSeconds = 60;

	/** Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of texts that
	 * several jobs begin with. The least recently used are dropped; 0: none are kept. In MiB. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0"))
	double KvCacheMb = 512;

	/** `on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later loads
	 * only. One of off, on. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Loading = TEXT("off");

	/** LoRA adapters that jobs may use, each as `NAME=PATH` of a GGUF file. Their weights are in VRAM at every
	 * budget. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	TArray<FString> Adapters;

	/** Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one; empty:
	 * nowhere. The HTTP server is a process of its own that ends with the sidecar. Refused with `bad_argument` if
	 * the packages of `frameshard[http]` are not installed, or if the address cannot be listened on. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Http;

	/** Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new one. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString HttpKey;

	/** Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a process
	 * for it. That process encodes texts on the CPU at idle priority and uses no VRAM. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Embedder;

	/** Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty: none. Jobs
	 * go there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet their
	 * deadline. Needs `frameshard[fallback]`. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Fallback;

	/** Name of the model that the server is asked for. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString FallbackModel;

	/** Path of a file with the server's key, which only this user may read; empty: none. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString FallbackKeyFile;

	/** Name of the environment variable with the server's key; empty: none. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString FallbackKeyEnv;

	/** Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where prompts and
	 * the key can be read on the way. One of loopback, anywhere. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString FallbackHttp = TEXT("loopback");

	/** Limit for all host memory that the sidecar's processes use, with the model's file in the page cache; 0: no
	 * limit. Only on Linux; elsewhere it is refused with `unsupported`. In MiB. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0"))
	double HostBudgetMb = 0;
	// end of launch options

	/** Path of the Python that runs the sidecar, relative to the project's Content folder, such as sidecar/python of a
	 * bundle; empty: python3. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Python;

	/** Path of a file to which the sidecar appends its log, relative to the project's Saved folder; empty: the game's standard error. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString LogFile;

	/** A JSON object with further launch options; they take precedence over the others. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString ExtraJson;

	/** If set, the sidecar starts with the game instance. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	bool bLaunchAtStart = true;

	/** Seconds that the sidecar gets to end when the game ends; then it is killed. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double CloseSeconds = 3;

	/** Maximum number of events that are handled in one frame. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "1"))
	int32 EventsPerFrame = 64;

	/** Milliseconds that a frame should take, 0.1 to 10,000. The sidecar leaves GPU time to frames; 0: it ignores them. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "0", ClampMax = "10000"))
	double TargetFrameMs = 16.7;

	/** How the GPU is shared with frames. PrioritizeGraphics: the sidecar uses only the GPU time that frames leave
	 * free. Balance: more, as long as frames stay within their target time. PrioritizeCompute: it ignores frames. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames")
	EFrameshardSchedulingMode Scheduling = EFrameshardSchedulingMode::Balance;
};
