#pragma once

#include "CoreMinimal.h"
#include "Kismet/BlueprintAsyncActionBase.h"

#include "FrameshardTypes.h"

#include "FrameshardAsyncActions.generated.h"

class UFrameshardSubsystem;

/** A Blueprint node that asks the model, with or without a character. */
UCLASS()
class FRAMESHARD_API UFrameshardAskAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	UPROPERTY(BlueprintAssignable)
	FFrameshardText OnToken;

	UPROPERTY(BlueprintAssignable)
	FFrameshardText OnSentence;

	/** Of a question with images. */
	UPROPERTY(BlueprintAssignable)
	FFrameshardProgressed OnProgress;

	UPROPERTY(BlueprintAssignable)
	FFrameshardAnswered OnCompleted;

	UPROPERTY(BlueprintAssignable)
	FFrameshardError OnFailed;

	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject", DisplayName = "Ask frameshard"))
	static UFrameshardAskAsync* AskFrameshard(
		UObject* WorldContextObject, const FString& Text, const FFrameshardAskParams& Params);

	/** Ends the answer early: OnFailed follows, with the code of a cancelled job. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Cancel();

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	FString Question;
	FFrameshardAskParams AskParams;
	int64 Job = 0;
};

/** Blueprint nodes that propose a lease and go on when the memory is given back. */
UCLASS()
class FRAMESHARD_API UFrameshardSetLeaseAsync : public UBlueprintAsyncActionBase
{
	GENERATED_BODY()

public:
	/** At once: what can be reached by the deadline. Not called if the lease is refused. */
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

	/** A lease with nothing but a budget, in MiB; 0: no limit. */
	UFUNCTION(BlueprintCallable, Category = "frameshard",
		meta = (BlueprintInternalUseOnly = "true", WorldContext = "WorldContextObject",
			DisplayName = "Set frameshard VRAM budget"))
	static UFrameshardSetLeaseAsync* SetFrameshardVramBudget(UObject* WorldContextObject, double Megabytes);

	virtual void Activate() override;

private:
	TWeakObjectPtr<UFrameshardSubsystem> Sidecar;
	FFrameshardLease Proposed;
};
