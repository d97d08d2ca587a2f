#pragma once

#include "CoreMinimal.h"

#include "FrameshardTypes.generated.h"

/** What a question may be given. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAskParams
{
	GENERATED_BODY()

	/** What was said in a conversation before belongs to the prompt. Empty: a question by itself. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Conversation;

	/** Who the model is from now on in this conversation. Empty: as it is. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FString Persona;

	/** Length of the answer at most. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	int32 MaxTokens = 256;

	/** 0 to 5; 0: always the likeliest token. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	double Temperature = 0.8;

	/** The same seed, prompt and values give the same text; below 0: any. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	int64 Seed = -1;
};

/** A whole answer. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardAnswer
{
	GENERATED_BODY()

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	FString Text;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 PromptTokens = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	int32 GeneratedTokens = 0;

	/** Until the first token. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double PrefillSeconds = 0;

	/** From there to the end. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double DecodeSeconds = 0;
};

/** A budget that is in force. */
USTRUCT(BlueprintType)
struct FRAMESHARD_API FFrameshardBudget
{
	GENERATED_BODY()

	/** In MiB; 0: no limit. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double BudgetMb = 0;

	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double UsedMb = 0;

	/** Until what did not fit was given back. */
	UPROPERTY(BlueprintReadOnly, Category = "frameshard")
	double Seconds = 0;
};

/** Code is the protocol's, Message says what to do. */
DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(FFrameshardError, const FString&, Message, int32, Code);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardText, const FString&, Text);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardAnswered, const FFrameshardAnswer&, Answer);
DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(FFrameshardBudgetChanged, const FFrameshardBudget&, Budget);
DECLARE_DYNAMIC_MULTICAST_DELEGATE(FFrameshardHappened);
