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
	/** Persona, sampling and images. An empty conversation is named after the actor. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "frameshard")
	FFrameshardAskParams Params;

	/** More of the answer; never cut within a character. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnTokenGenerated;

	/** A whole sentence of the answer, for text to speech, while the next one is generated. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardText OnSentenceGenerated;

	/** Of a question with images, before its text. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardProgressed OnProgress;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardAnswered OnResponseGenerated;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardError OnError;

	/** Asks the character. An answer that is being generated is ended first. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Ask(const FString& Text);

	/** Ends the answer that is being generated; no more delegates are called for it. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void StopGeneration();

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsSpeaking() const;

	virtual void EndPlay(const EEndPlayReason::Type EndPlayReason) override;

private:
	/** The job whose events are handed on; 0: none. */
	int64 Job = 0;
	/** Counts the questions, to tell late events of an older answer. */
	int32 Question = 0;
};
