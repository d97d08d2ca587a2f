#pragma once

#include "Components/ActorComponent.h"
#include "CoreMinimal.h"

#include "FrameshardTypes.h"

#include "FrameshardNpcComponent.generated.h"

/** One character: a persona and a conversation of its own. */
UCLASS(ClassGroup = (frameshard), meta = (BlueprintSpawnableComponent))
class FRAMESHARD_API UFrameshardNpcComponent : public UActorComponent
{
	GENERATED_BODY()

public:
	/** Persona, length and temperature. An empty conversation is named after the actor. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FFrameshardAskParams Params;

	/** More of the answer; never cut within a character. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnTokenGenerated;

	/** A whole sentence of the answer, for text to speech, while the next is being made. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnSentenceGenerated;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardAnswered OnResponseGenerated;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardError OnError;

	/** Says something to the character. A question that is being answered is ended first. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Ask(const FString& Text);

	/** Ends the answer that is being given; nothing more is heard of it. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void StopGeneration();

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsSpeaking() const;

	virtual void EndPlay(const EEndPlayReason::Type EndPlayReason) override;

private:
	/** The answer that is listened to; 0: none. */
	int64 Job = 0;
	/** Counts the questions, so that what is left of an older answer is not taken for the new one. */
	int32 Question = 0;
};
