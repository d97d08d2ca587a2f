#pragma once

#include "CoreMinimal.h"
#include "Kismet/BlueprintAsyncActionBase.h"

#include "FrameshardTypes.h"

#include "FrameshardAsyncActions.generated.h"

class UFrameshardSubsystem;

/** Blueprint nodes that ask the model a question, or give it the results of its calls of tools. They need no
 * FrameshardNpcComponent. The pin AsyncAction has Cancel and SetPriority. */
UCLASS(BlueprintType, meta = (ExposedAsyncProxy = "AsyncAction"))
class FRAMESHARD_API UFrameshardAskAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	UPROPERTY(BlueprintAssignable)
	FFrameshardText OnToken;

	UPROPERTY(BlueprintAssignable)
	FFrameshardText OnSentence;

	/** Called for a question with images, before the text of its answer. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardProgressed OnProgress;

	/** Called with each part of the thought, if Thinking is Shown. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardText OnThought;

	/** Called with each call of a tool, when it is whole. Arguments is JSON that matches the tool's schema. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardToolCalled OnToolCall;

	/** Called with true when a question of higher priority has taken the place of this one, and with false when it
	 * continues. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardPaused OnPaused;

	UPROPERTY(BlueprintAssignable)
	FFrameshardAnswered OnCompleted;

	UPROPERTY(BlueprintAssignable)
	FFrameshardError OnFailed;

	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject", DisplayName = "Ask frameshard"))
	static UFrameshardAskAsync* AskFrameshard(
		UObject* WorldContextObject, const FString& Text, const FFrameshardAskParams& Params);

	/** Has the model go on after an answer with calls of tools. Results has the result of each call by its CallId.
	 * Params must name the conversation, and the Tools again if the model may call further ones. */
	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Give frameshard tool results"))
	static UFrameshardAskAsync* GiveFrameshardToolResults(
		UObject* WorldContextObject, const TMap<FString, FString>& Results, const FFrameshardAskParams& Params);

	/** Ends the answer early. OnFailed follows with the protocol's code for `cancelled`. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Cancel();

	/** Changes the priority of the current answer: 0 for background, 1 for normal, 2 for urgent. Takes effect at once: it
	 * may pause another answer, or this one. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetPriority(int32 Priority);

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	bool bGivesResults = false;
	FString Question;
	TMap<FString, FString> Given;
	FFrameshardAskParams AskParams;
	int64 Job = 0;
};

/** A Blueprint node that asks the sentence encoder (setting Embedder) for the embeddings of 1 to 64 texts. */
UCLASS()
class FRAMESHARD_API UFrameshardEmbedAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	/** Rows has NDim numbers for each text, whose squares add up to 1. Texts of similar meaning have rows with a large
	 * dot product. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardEmbedded OnEmbedded;

	UPROPERTY(BlueprintAssignable)
	FFrameshardError OnFailed;

	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Embed texts with frameshard"))
	static UFrameshardEmbedAsync* EmbedFrameshardTexts(UObject* WorldContextObject, const TArray<FString>& Texts);

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	TArray<FString> Embedded;
};

/** Blueprint nodes that count the tokens of a prompt. */
UCLASS()
class FRAMESHARD_API UFrameshardCountTokensAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	/** NLeft tokens still fit into the context behind the prompt. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardCounted OnCounted;

	UPROPERTY(BlueprintAssignable)
	FFrameshardError OnFailed;

	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Measure frameshard prompt"))
	static UFrameshardCountTokensAsync* CountFrameshardTokens(UObject* WorldContextObject, const FString& Prompt);

	/** For the messages of a chat, such as those of History, and tools, which its prompt describes. */
	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Measure frameshard messages"))
	static UFrameshardCountTokensAsync* CountFrameshardChatTokens(UObject* WorldContextObject,
		const TArray<FFrameshardMessage>& Messages, const TArray<FFrameshardTool>& Tools);

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	bool bCountsMessages = false;
	FString Counted;
	TArray<FFrameshardMessage> CountedMessages;
	TArray<FFrameshardTool> CountedTools;
};

/** Blueprint nodes that propose a lease and continue when the VRAM is released. */
UCLASS()
class FRAMESHARD_API UFrameshardSetLeaseAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	/** Called at once with the decision: the budget that can be reached by the deadline. Not called if the lease is
	 * refused. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardDecided OnDecided;

	UPROPERTY(BlueprintAssignable)
	FFrameshardBudgetChanged OnReleased;

	UPROPERTY(BlueprintAssignable)
	FFrameshardError OnFailed;

	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Set frameshard lease"))
	static UFrameshardSetLeaseAsync* SetFrameshardLease(UObject* WorldContextObject, const FFrameshardLease& Lease);

	/** Proposes a lease with this VRAM budget (MiB; 0: no limit) and defaults for the rest. */
	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Set frameshard VRAM budget"))
	static UFrameshardSetLeaseAsync* SetFrameshardVramBudget(UObject* WorldContextObject, double Megabytes);

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	FFrameshardLease Proposed;
};
