#pragma once

#include "CoreMinimal.h"
#include "Engine/DeveloperSettings.h"

#include "FrameshardSettings.generated.h"

/** Project settings, under Plugins: what is launched, and how it shares the machine with the game. */
UCLASS(Config = Game, DefaultConfig, meta = (DisplayName = "frameshard"))
class FRAMESHARD_API UFrameshardSettings : public UDeveloperSettings
{
	GENERATED_BODY()

public:
	/** Path of a GGUF file; a relative one begins in the project's Content folder. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Model;

	/** auto, cpu, emulated, or a name such as CUDA0. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Device = TEXT("auto");

	/** All that the model may hold in VRAM, in MiB; 0: no limit. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double VramBudgetMb = 2048;

	/** Tokens of context of each conversation. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1"))
	int32 ContextTokens = 4096;

	/** Conversations that are answered at a time. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "1"))
	int32 Parallel = 4;

	/** The sidecar's Python: sidecar/python of a bundle, relative to the project's Content folder; empty: python3. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	FString Python;

	/** Whether the sidecar starts with the game instance. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar")
	bool bLaunchAtStart = true;

	/** Most events that are handed to the game in one frame. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "1"))
	int32 EventsPerFrame = 64;

	/** Milliseconds that a frame should take, which the sidecar keeps out of; 0: it takes no notice of frames. */
	UPROPERTY(Config, EditAnywhere, Category = "Frames", meta = (ClampMin = "0"))
	double TargetFrameMs = 16.7;

	/** Seconds that the sidecar has to take its leave at the end of the game. */
	UPROPERTY(Config, EditAnywhere, Category = "Sidecar", meta = (ClampMin = "0"))
	double CloseSeconds = 3;
};
