#pragma once

#include "CoreMinimal.h"

#include "FrameshardTypes.generated.h"

// Unknown is a word of a newer sidecar.
// generated: enumerations
UENUM(BlueprintType)
enum class EFrameshardLeaseState : uint8
{
	Unknown = 0 UMETA(Hidden),
	Active = 1,
	Parked = 2,
	Hibernated = 3,
};

UENUM(BlueprintType)
enum class EFrameshardDecision : uint8
{
	Unknown = 0 UMETA(Hidden),
	Granted = 1,
	Partial = 2,
};

UENUM(BlueprintType)
enum class EFrameshardNoticeKind : uint8
{
	Unknown = 0 UMETA(Hidden),
	Wants = 1,
	GivesBack = 2,
	Late = 3,
	Pressure = 4,
	OtherProcess = 5,
	State = 6,
};

UENUM(BlueprintType)
enum class EFrameshardReason : uint8
{
	Unknown = 0 UMETA(Hidden),
	Stop = 1,
	Length = 2,
};

UENUM(BlueprintType)
enum class EFrameshardPhase : uint8
{
	Unknown = 0 UMETA(Hidden),
	Encode = 1,
	Prefill = 2,
};

UENUM(BlueprintType)
enum class EFrameshardImageFormat : uint8
{
	Unknown = 0 UMETA(Hidden),
	Encoded = 1,
	Rgb = 2,
	Rgba = 3,
};

UENUM(BlueprintType)
enum class EFrameshardSchedulingMode : uint8
{
	Unknown = 0 UMETA(Hidden),
	PrioritizeGraphics = 1,
	Balance = 2,
	PrioritizeCompute = 3,
};
// end of enumerations

/** An image in memory. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardImage
{
	GENERATED_BODY()

	/** Encoded: a PNG or JPEG file. Else rows of pixels from the top, 8 bits a channel; alpha is not used. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	EFrameshardImageFormat Format = EFrameshardImageFormat::Encoded;

	/** In pixels; 0 of an encoded image. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Width = 0;

	/** In pixels; 0 of an encoded image. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Height = 0;

	/** Bytes from one row to the next; 0: rows follow each other without a gap. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Stride = 0;

	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<uint8> Data;
};

/** What a question may be given. In mode stream_only the same seed, prompt and values give the same text. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAskParams
{
	GENERATED_BODY()

	/** Name of the conversation whose history belongs to the prompt. Empty: a question by itself. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Conversation;

	/** The conversation's system text from now on. Empty: as it is. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Persona;

	/** Stand before the question, for models with an Mmproj; at most 8. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FFrameshardImage> Images;

	/** Comes back with the answer. A game that loads a save counts it up, to tell answers to an older past. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int64 Timeline = 0;

	/** Events that may be under way before the game takes them. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "1", ClampMax = "256"))
	int32 Window = 32;

	// generated: sampling
	/** Maximum length of the answer in tokens. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "1", ClampMax = "1048576"))
	int32 MaxTokens = 256;

	/** Choose only among this many most likely tokens; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1048576"))
	int32 TopK = 40;

	/** Randomness of the choice; 0: always the most likely token. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "5"))
	double Temperature = 0.8;

	/** Choose only among the most likely tokens whose probabilities add up to this value; 1: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1"))
	double TopP = 0.95;

	/** Choose only among tokens with at least this fraction of the highest probability; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1"))
	double MinP = 0.05;

	/** Above 1, tokens that occur among the last 64 become less likely; 1: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0.5", ClampMax = "2"))
	double RepeatPenalty = 1;

	/** Seed of the random numbers; without it the sidecar chooses one. 0 to 4294967295; below 0: not given. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	int64 Seed = -1;

	/** Strings that end the answer; they are not part of it. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FString> Stop;

	/** A JSON schema. The answer is JSON that matches it, unless `max_tokens` or `stop` ends the answer early;
	 * empty: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString JsonSchema;

	/** Subtracted from a token's logit for each time that the token occurs among the last 64; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-2", ClampMax = "2"))
	double FrequencyPenalty = 0;

	/** Subtracted once from a token's logit if the token is among the last 64; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-2", ClampMax = "2"))
	double PresencePenalty = 0;
	// end of sampling
};

/** A whole answer. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAnswer
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString Text;

	/** Stop: the model ended or a stop string came. Length: MaxTokens. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardReason Reason = EFrameshardReason::Unknown;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 PromptTokens = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 GeneratedTokens = 0;

	/** From the start of the prompt to the first token. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double PrefillSeconds = 0;

	/** From there to the end. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double DecodeSeconds = 0;

	/** As the question was asked with it. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int64 Timeline = 0;
};

/** How far a question with images is: images that are encoded, or tokens of the prompt. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardProgress
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardPhase Phase = EFrameshardPhase::Unknown;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 Done = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 Total = 0;
};

/** A lease that the game proposes. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardLease
{
	GENERATED_BODY()

	// generated: lease
	/** `parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no VRAM is
	 * used. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	EFrameshardLeaseState State = EFrameshardLeaseState::Active;

	/** Limit for all VRAM that the sidecar uses; 0: no limit. If `state` is not `active`: the budget to use once it
	 * is active again. In MiB. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	double VramBudgetMb = 0;

	/** A sidecar that is idle for some time shrinks to this VRAM budget on its own; 0: it does not shrink. In MiB. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	double FloorMb = 0;

	/** Version of the lease. It is refused with `stale_lease` unless it is higher than the version in force; 0:
	 * never refused for its version. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int64 Version = 0;

	/** Time that the sidecar has to release the VRAM above the budget. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0.001", ClampMax = "60"))
	double TimeoutSeconds = 5;

	/** Text for the sidecar's log. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Reason;
	// end of lease
};

/** What the sidecar has decided about a proposed lease, before it begins. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardDecision
{
	GENERATED_BODY()

	/** Partial: by the deadline only BudgetMb is reached. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardDecision Decision = EFrameshardDecision::Unknown;

	/** Reached by the deadline, in MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	/** Until all of the lease is reached, as predicted. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;

	/** Of the lease in force. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int64 Version = 0;
};

/** A budget that is in force. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardBudget
{
	GENERATED_BODY()

	/** In MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	/** What the sidecar holds, in MiB. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double UsedMb = 0;

	/** Until what did not fit was given back. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;
};

/** What the sidecar says about its VRAM without being asked. PROTOCOL.md ("The lease") has the kinds. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardNotice
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardNoticeKind Kind = EFrameshardNoticeKind::Unknown;

	/** In MiB. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;

	/** A sentence for a log; of State the name of the state. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString Text;
};

/** Code is the protocol's, Message says what to do. */
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(FFrameshardError, const FString&, Message, int32, Code);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardText, const FString&, Text);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardProgressed, const FFrameshardProgress&, Progress);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardAnswered, const FFrameshardAnswer&, Answer);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardDecided, const FFrameshardDecision&, Decision);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardBudgetChanged, const FFrameshardBudget&, Budget);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardNoticed, const FFrameshardNotice&, Notice);
DECLARE_DYNAMIC_MULTICAST_DELEGATE(FFrameshardHappened);
