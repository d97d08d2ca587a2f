#pragma once

#include "CoreMinimal.h"
#include "Engine/DeveloperSettings.h"

#include "FrameshardTypes.h"

#include "FrameshardSettings.generated.h"

/** Project settings, under Plugins: what is launched, and how it shares the machine with the game. */
UCLASS(Config = Game, DefaultConfig, meta = (DisplayName = "frameshard"))
class FRAMESHARD_API UFrameshardSettings : public UDeveloperSettings
{
	GENERATED_BODY()

public:
	// Model, Mmproj and DraftModel may be relative to the project's Content folder.
	// generated: launch options
	/** Path of a GGUF file; the only option without a default. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Model;

	/** `auto` (the first GPU, else the CPU), `cpu`, `emulated`, or a ggml device such as `CUDA0`. For tests:
	 * `emulated:25` copies 25e9 bytes/s at most. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Device = TEXT("auto");

	/** All that the sidecar may hold in VRAM; 0: no limit. In MiB. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double VramBudgetMb = 2048;

	/** Context of each conversation, rounded up to a multiple of 256; VRAM is taken for the tokens in use. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1", ClampMax = "16777216"))
	int32 NCtx = 4096;

	/** Jobs that run at once, each in a context of its own. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1", ClampMax = "64"))
	int32 NParallel = 4;

	/** Tokens of a prompt that are computed at once. Streamed weights are copied once for each so many, and the
	 * buffers for them are part of the floor. 0: chosen at launch, for the least time of a long prompt and the
	 * first 16 tokens of its answer, with a floor of about half of the budget at most (or that of 512, if it is
	 * higher); without a budget 512. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "65536"))
	int32 NUbatch = 512;

	/** CPU threads; 0: half of the CPUs. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1024"))
	int32 NThreads = 0;

	/** A client whose connection is gone and that does not come back for so long loses its jobs. One that is
	 * connected and silent (a breakpoint, a long load) keeps them. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double SilentSeconds = 10;

	/** How clients connect: `ipc`, or `tcp` on the loopback (the default on Windows). Both are encrypted. One of
	 * ipc, tcp. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Transport;

	/** Where to listen: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, a fresh place. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Endpoint;

	/** Where to leave what further clients need to connect, readable by this user only; without it, a fresh place.
	 * Refused with `bad_argument` where it cannot be written. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString ConnectFile;

	/** Path of the GGUF file that reads images for this model; empty: none. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Mmproj;

	/** `stream_only`: the same bits at any budget, at the cost of speed. One of planned, stream_only. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Mode = TEXT("planned");

	/** Speculative decoding: `auto` drafts repeated text by lookup and verifies several tokens at a time where that
	 * pays; `off`: never. One of auto, off. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString Speculate = TEXT("auto");

	/** Path of the GGUF file of a small model with the same vocabulary (empty: none), which drafts what does not
	 * repeat, where that pays. It runs on the CPU, with its weights and its KV cache (16,384 tokens at most) in
	 * host memory. Not loaded where nothing can be drafted: with `speculate` off, on the CPU alone or with
	 * recurrent models. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString DraftModel;

	/** Type of the KV cache: `q8_0` takes half, `q4_0` little more than a quarter of the bytes of `f16`, at some
	 * loss. Refused with `unsupported` where the model's heads are no multiple of 32. The floor is not lower by it
	 * on NVIDIA's GPUs, where prompts have a layer's whole context in 16 bits beside it. One of f16, q8_0, q4_0. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString KvType = TEXT("f16");

	/** Jobs of all clients that have not ended. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "1", ClampMax = "1024"))
	int32 MaxJobs = 256;

	/** Jobs of one client that have not ended. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "1", ClampMax = "1024"))
	int32 MaxClientJobs = 64;

	/** Text kept for one job whose client does not read; beyond, the job fails. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "49152"))
	int32 HeldBytes = 49152;

	/** An engine without work that does not answer for so long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangIdleSeconds = 5;

	/** An engine with work that does not answer for so long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangBusySeconds = 60;

	/** An engine that loads and does not answer for so long is replaced. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangLoadSeconds = 600;

	/** An engine of which no thread runs for so long is stopped, and replaced whatever it does. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double HangStillSeconds = 5;

	/** Deaths of the engine within `restart_window_s`, without a new token in between and while no job runs, after
	 * which it is off for `off_pause_s`. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000"))
	int32 RestartLimit = 3;

	/** Span of time for `restart_limit`. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double RestartWindowSeconds = 300;

	/** Pause of an engine that cannot be kept alive; then it is tried again. Each is twice as long as the last. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double OffPauseSeconds = 1;

	/** The longest such pause. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay, meta = (ClampMin = "0", ClampMax = "1000000"))
	double OffPauseMaxSeconds = 60;
	// end of launch options

	/** The sidecar's Python: sidecar/python of a bundle, relative to the project's Content folder; empty: python3. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Python;

	/** The sidecar appends its log to this file; empty: the standard error of the game. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString LogFile;

	/** A JSON object with further fields of the sidecar's first line; they win. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", AdvancedDisplay)
	FString ExtraJson;

	/** Whether the sidecar starts with the game instance. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	bool bLaunchAtStart = true;

	/** Seconds that the sidecar has to end at the end of the game; then it is killed. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double CloseSeconds = 3;

	/** Most events that are handed to the game in one frame. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "1"))
	int32 EventsPerFrame = 64;

	/** Milliseconds that a frame should take, which the sidecar keeps out of; 0: it takes no notice of frames. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "0"))
	double TargetFrameMs = 16.7;

	/** Whose work on the GPU comes first. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames")
	EFrameshardSchedulingMode Scheduling = EFrameshardSchedulingMode::Balance;
};
