#pragma once

#include "CoreMinimal.h"

#include "FrameshardTypes.generated.h"

// Unknown stands for a value of a newer sidecar that this plugin does not know.
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
enum class EFrameshardEngineState : uint8
{
	Unknown = 0 UMETA(Hidden),
	Loading = 1,
	Ready = 2,
	Restarting = 3,
	Off = 4,
	Hibernated = 5,
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
	Http = 7,
	HostPressure = 8,
};

UENUM(BlueprintType)
enum class EFrameshardReason : uint8
{
	Unknown = 0 UMETA(Hidden),
	Stop = 1,
	Length = 2,
	ToolCalls = 3,
};

UENUM(BlueprintType)
enum class EFrameshardPhase : uint8
{
	Unknown = 0 UMETA(Hidden),
	Encode = 1,
	Prefill = 2,
};

UENUM(BlueprintType)
enum class EFrameshardLoadingStage : uint8
{
	Unknown = 0 UMETA(Hidden),
	Read = 1,
	Profile = 2,
	Fill = 3,
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

	/** Encoded: a PNG or JPEG file, or a sound as a WAV or MP3 file. Rgb, Rgba: rows of pixels from top to bottom,
	 * 8 bits a channel; alpha is ignored. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	EFrameshardImageFormat Format = EFrameshardImageFormat::Encoded;

	/** Pixels; 0 if encoded. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Width = 0;

	/** Pixels; 0 if encoded. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Height = 0;

	/** Bytes from the start of one row to the start of the next; 0: no gap between rows. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Stride = 0;

	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<uint8> Data;
};

/** A call of a tool, in an answer. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardToolCall
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString CallId;

	/** Name of the tool. */
	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString Name;

	/** JSON, an object. */
	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString Arguments;
};

/** One message of a conversation. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardMessage
{
	GENERATED_BODY()

	/** "system", "user", "assistant", or "tool" for the result of a call. */
	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString Role;

	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString Content;

	/** The calls of an answer, behind its text. */
	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	TArray<FFrameshardToolCall> ToolCalls;

	/** Of a result: the CallId of its call. Else empty. */
	UPROPERTY(BlueprintReadWrite, Category = "frameshard")
	FString ToolCallId;
};

/** What the subsystem's SaveKv has written or LoadKv has read. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardKv
{
	GENERATED_BODY()

	/** Its path. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString File;

	/** Tokens of the KV cache; 0: none, and the text is read anew. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 NTokens = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int64 FileBytes = 0;

	/** Why NTokens is 0; else empty. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString WhyNone;
};

/** What the subsystem's Load has found. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardLoadResult
{
	GENERATED_BODY()

	/** The save was made with the loaded model. Another model gives other answers. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	bool bSameModel = false;

	/** It was made with the same chat template. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	bool bSameTemplate = false;
};

/** Makes a token, or each token of a text, more or less likely. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardLogitBias
{
	GENERATED_BODY()

	/** Most words have one token with a space before it and another one without it. Empty: Token counts. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Text;

	/** Id of a token, if Text is empty. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int32 Token = 0;

	/** Added to the logits. -100 in effect bans a token, 100 in effect forces it. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-100", ClampMax = "100"))
	double Bias = 0;
};

/** Whether the model thinks before it answers. */
UENUM(BlueprintType)
enum class EFrameshardThinking : uint8
{
	Off = 0,
	/** It thinks, and the thought is not sent. */
	Hidden = 1,
	/** The thought is sent apart from the answer. */
	Shown = 2,
};

/** A function of the game that the model may call. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardTool
{
	GENERATED_BODY()

	/** 1 to 64 letters, digits, '_' and '-'; not "auto", "required" or "none". */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Name;

	/** What it does and when to use it, for the model. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Description;

	/** A JSON schema of the arguments, which are an object. Empty: it has no arguments. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Schema;
};

/** Options of a question. In mode stream_only the same seed, prompt and values give the same text. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAskParams
{
	GENERATED_BODY()

	/** Name of the conversation. Its earlier questions and answers are part of the prompt. Empty: none. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Conversation;

	/** Sets the conversation's system text. Empty: unchanged. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Persona;

	/** Images before the question, at most 8. The project settings must name an Mmproj. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FFrameshardImage> Images;

	/** A number that the answer repeats. A game that increases it when a save is loaded can discard answers to
	 * questions from before the load. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	int64 Timeline = 0;

	/** Maximum number of events that are sent but not handled by the game yet. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "1", ClampMax = "256"))
	int32 Window = 32;

	/** 0: background, 1: normal, 2: urgent. A question pauses a running one of lower priority if NParallel of them run;
	 * the paused one continues later. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "2"))
	int32 Priority = 1;

	/** The question and what comes before it are only read, so that later questions that begin with the same text need
	 * not read it. All other questions go first. The answer is empty. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	bool bWarmUp = false;

	/** Scales of LoRA adapters by name, at most 2, from -4 to 4. Questions with equal adapters are computed together,
	 * others in turns. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TMap<FString, double> Adapters;

	/** The question fails with the code for `deadline_missed` if its answer has not begun after so many milliseconds; 0:
	 * no deadline. Of questions of equal priority the one with the earliest deadline goes first. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "3600000"))
	int32 DeadlineMs = 0;

	/** Whether the model thinks before it answers. Hidden: the thought is not sent. Shown: it comes in OnThought. The
	 * question fails if the model does not think. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	EFrameshardThinking Thinking = EFrameshardThinking::Off;

	/** Maximum length of the thought in tokens; then it is ended, and the answer begins. 0: no limit but MaxTokens, which
	 * counts thought and answer. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1048576"))
	int32 ThinkingTokens = 0;

	/** A JSON object with further variables for the model's chat template; empty: none. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString TemplateKeywords;
	/** The question never goes to the server of the launch option Fallback. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	bool bLocalOnly = false;

	/** Functions of the game that the model may call, at most 64. OnToolCall tells each call. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FFrameshardTool> Tools;

	/** "auto" or empty: the answer is text, or ends with calls. "required": it is calls. "none": it is text. The name
	 * of a tool: it is calls of this tool. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString ToolChoice;

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

	/** A JSON schema. The answer is JSON that matches it, unless `MaxTokens` or `Stop` ends the answer early;
	 * empty: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString JsonSchema;

	/** Subtracted from a token's logit for each time that the token occurs among the last 64; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-2", ClampMax = "2"))
	double FrequencyPenalty = 0;

	/** Subtracted once from a token's logit if the token is among the last 64; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-2", ClampMax = "2"))
	double PresencePenalty = 0;

	/** Locally typical sampling: choose only among the most typical tokens whose probabilities add up to this
	 * value; 1: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1"))
	double TypicalP = 1;

	/** XTC sampling: the chance that all tokens above `XtcThreshold`, except the least likely of them, are removed;
	 * 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "1"))
	double XtcProbability = 0;

	/** XTC sampling removes only tokens with at least this probability. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "0.5"))
	double XtcThreshold = 0.1;

	/** The answer is exactly one of these strings. Set at most one of `JsonSchema`, `Choices`, `Regex` and `Lark`. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FString> Choices;

	/** The whole answer matches this regular expression, in the syntax of Rust's regex crate; empty: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Regex;

	/** The answer matches this grammar in llguidance's variant of Lark; empty: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Lark;

	/** Tokens that are more or less likely than the model finds them. Several biases of one token add up. An answer
	 * with a form still has it. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FFrameshardLogitBias> LogitBias;

	/** DRY sampling: a token that would repeat a sequence of n tokens, n at least `DryAllowedLength`, loses
	 * `DryMultiplier` * `DryBase` ^ (n - `DryAllowedLength`) of its logit; 0: off. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0", ClampMax = "100"))
	double DryMultiplier = 0;

	/** DRY sampling: growth of the penalty with each token. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "1", ClampMax = "10"))
	double DryBase = 1.75;

	/** DRY sampling: shortest repeated sequence whose next token is penalised. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "1", ClampMax = "1024"))
	int32 DryAllowedLength = 2;

	/** DRY sampling: how many of the last tokens are searched for repeats; 0: off, -1: the whole context. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "-1", ClampMax = "1048576"))
	int32 DryPenaltyLastN = -1;

	/** DRY sampling: no sequence goes beyond one of these strings; empty: line break, colon, quotation mark and
	 * asterisk. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	TArray<FString> DrySequenceBreakers;
	// end of sampling
};

/** A whole answer. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAnswer
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString Text;

	/** Stop: the model ended the answer, or a stop string came. Length: MaxTokens was reached. ToolCalls: the answer ends
	 * with calls of tools, which wait for their results. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardReason Reason = EFrameshardReason::Unknown;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 PromptTokens = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 GeneratedTokens = 0;

	/** Number of prompt tokens that were already in the KV cache. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 ReusedTokens = 0;

	/** Number of tokens that still fit into the context behind prompt and answer. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 LeftTokens = 0;

	/** How many of the conversation's oldest questions, with their answers, were not in the prompt because the context is
	 * full. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 DroppedQuestions = 0;

	/** Number of the tokens in GeneratedTokens that the model thought. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 ThoughtTokens = 0;
	/** True if the server of the launch option Fallback has ended the answer. The numbers of tokens are those that it
	 * reports, if it does. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	bool bRemote = false;

	/** Time from the start of the prefill to the first token. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double PrefillSeconds = 0;

	/** Time from the first token to the end of the answer. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double DecodeSeconds = 0;

	/** The Timeline of the question. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int64 Timeline = 0;
};

/** Progress of a question with images or a long prompt. Done and Total count images (Encode) or prompt tokens (Prefill). */
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

	/** Limit for all VRAM that the sidecar uses; 0: no limit. If `State` is not `active`: the budget to use once it
	 * is active again. In MiB. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard", meta = (ClampMin = "0"))
	double VramBudgetMb = 0;

	/** The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does not. In
	 * MiB. */
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

	/** Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the limit in
	 * force stays. In MiB; below 0: not given. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	double HostBudgetMb = -1;
	// end of lease
};

/** The decision about a proposed lease. It comes before any VRAM is released. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardDecision
{
	GENERATED_BODY()

	/** Partial: only BudgetMb can be reached by the deadline. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardDecision Decision = EFrameshardDecision::Unknown;

	/** VRAM budget that will be reached by the deadline, in MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	/** Predicted time until the release is complete. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;

	/** Version of the lease in force. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int64 Version = 0;

	/** Host budget that will be reached by the deadline, in MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double HostBudgetMb = 0;
};

/** Budgets that are in force. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardBudget
{
	GENERATED_BODY()

	/** In MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	/** VRAM that the sidecar uses, in MiB. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double UsedMb = 0;

	/** Time that the release took. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;

	/** Limit for host memory in MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double HostBudgetMb = 0;

	/** Host memory that the sidecar uses, in MiB. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double HostUsedMb = 0;
};

/** How far the model is loaded, for a progress bar. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardLoading
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	EFrameshardLoadingStage Stage = EFrameshardLoadingStage::Unknown;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 Done = 0;

	/** MiB of the model file, steps of the profile, or MiB of weights to copy. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 Total = 0;
};

/** News about VRAM and the lease. PROTOCOL.md ("The lease") describes the kinds and their figures. */
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

	/** A text for a log. For State: the new state. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString Text;

	/** For HostPressure: the sidecar's own limit for its host memory, in MiB; 0: the pressure is over. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double HostBudgetMb = 0;
};

/** Code is the protocol's error code, Message a sentence about the error. */
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(FFrameshardError, const FString&, Message, int32, Code);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardText, const FString&, Text);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardProgressed, const FFrameshardProgress&, Progress);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(FFrameshardCounted, int32, NTokens, int32, NLeft);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(FFrameshardEmbedded, const TArray<float>&, Rows, int32, NDim);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardPaused, bool, bPaused);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_ThreeParams(
	FFrameshardToolCalled, const FString&, Name, const FString&, Arguments, const FString&, CallId);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardAnswered, const FFrameshardAnswer&, Answer);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardDecided, const FFrameshardDecision&, Decision);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardBudgetChanged, const FFrameshardBudget&, Budget);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(
	FFrameshardAdaptersChanged, const FString&, AdaptersJson, double, FloorMb);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardNoticed, const FFrameshardNotice&, Notice);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardLoaded, const FFrameshardLoading&, Loading);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_ThreeParams(
	FFrameshardEngineChanged, EFrameshardEngineState, State, int32, Restarts, const FString&, Message);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardKvDone, const FFrameshardKv&, Kv);
DECLARE_DYNAMIC_MULTICAST_DELEGATE(FFrameshardHappened);
