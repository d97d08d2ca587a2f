#pragma once

#include "Components/ActorComponent.h"
#include "CoreMinimal.h"

#include "FrameshardTypes.h"

#include "FrameshardNpcComponent.generated.h"

/** A character with its own persona and its own conversation. */
UCLASS(ClassGroup = (frameshard), meta = (BlueprintSpawnableComponent))
class FRAMESHARD_API UFrameshardNpcComponent : public UActorComponent
{
	GENERATED_BODY()

public:
	/** Persona, sampling and images. If Conversation is empty, the actor's name is used. */
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

	/** Ends the current answer. No more delegates are called for it. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void StopGeneration();

	/** Changes the priority of the current answer: 0 for background, 1 for normal, 2 for urgent. Takes effect at once: it
	 * may pause another answer, or this one. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetPriority(int32 Priority);

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsSpeaking() const;

	virtual void EndPlay(const EEndPlayReason::Type EndPlayReason) override;

private:
	/** The job of the current answer; 0: none. */
	int64 Job = 0;
	/** Number of questions so far. Identifies late events of an earlier answer. */
	int32 Question = 0;
};
