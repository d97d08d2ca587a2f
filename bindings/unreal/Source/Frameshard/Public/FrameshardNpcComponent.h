#pragma once

#include "Components/ActorComponent.h"
#include "CoreMinimal.h"

#include "FrameshardTypes.h"

#include <functional>

#include "FrameshardNpcComponent.generated.h"

class UFrameshardSubsystem;
struct FFrameshardListener;

/** A character with its own persona and its own conversation. */
UCLASS(ClassGroup = (frameshard), meta = (BlueprintSpawnableComponent))
class FRAMESHARD_API UFrameshardNpcComponent : public UActorComponent
{
	GENERATED_BODY()

public:
	/** Persona, sampling and images. If Conversation is empty, the actor's path is used, such as
	 * /Game/Town.Town:PersistentLevel.Mira. Set it for saved games, for actors that are spawned anew, and for paths of
	 * more than 512 bytes. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FFrameshardAskParams Params;

	/** Called with the next part of the answer. It never ends within a character. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnTokenGenerated;

	/** Called with each sentence of the answer as soon as it is complete, for text to speech. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnSentenceGenerated;

	/** Called for a question with images, before the text of its answer. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardProgressed OnProgress;

	/** Called with each part of the thought, if Thinking is Shown. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnThought;

	/** Called with each call of a tool, when it is whole. Arguments is JSON that matches the tool's schema. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardToolCalled OnToolCall;

	/** Called with true when a question of higher priority has taken the place of this one, and with false when it
	 * continues. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardPaused OnPaused;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardAnswered OnResponseGenerated;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardError OnError;

	/** Asks the character. Ends its current answer first, if there is one. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Ask(const FString& Text);

	/** Has the character go on after an answer with calls of tools. Results has the result of each call
	 * by its CallId. OnError is called if a result is missing, or if the answer with the calls has not ended. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void GiveToolResults(const TMap<FString, FString>& Results);

	/** Ends the current answer. No more delegates are called for it. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void StopGeneration();

	/** Changes the priority of the current answer: 0 for background, 1 for normal, 2 for urgent. Takes effect at once: it
	 * may pause another answer, or this one. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetPriority(int32 Priority);

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsSpeaking() const;

	/** The name of the character's conversation, for History, Forget, Save and Load of the subsystem. */
	UFUNCTION(BlueprintPure, Category = "frameshard")
	FString GetConversation() const;

	virtual void EndPlay(const EEndPlayReason::Type EndPlayReason) override;

private:
	/** Starts an answer by Call, which is Ask or ToolResults of the subsystem. */
	void Start(const std::function<int32(UFrameshardSubsystem& Sidecar, const FFrameshardAskParams& Asked,
			FFrameshardListener Listener, int64& Started, FString& Error)>& Call);

	/** Calls OnError in the next frame. */
	void Fail(const FString& Message, int32 Code);

	/** The job of the current answer; 0: none. */
	int64 Job = 0;
	/** Number of questions so far. Identifies late events of an earlier answer. */
	int32 Question = 0;
	/** OnError is being called. */
	bool bTelling = false;
};
