#pragma once

#include "CoreMinimal.h"
#include "Subsystems/GameInstanceSubsystem.h"
#include "Tickable.h"

#include "FrameshardTypes.h"

#include <functional>
#include <memory>

#include "FrameshardSubsystem.generated.h"

namespace frameshard
{
class Game;
}

/** Who listens to one answer, in C++; each may be empty. After OnEnd nothing follows. */
struct FFrameshardListener
{
	std::function<void(const FString& Text)> OnToken;
	std::function<void(const FString& Sentence)> OnSentence;
	/** Of a question with images. */
	std::function<void(const FFrameshardProgress& Progress)> OnProgress;
	/** Code 0: the answer is complete; else the protocol's code of the error, and Message. */
	std::function<void(const FFrameshardAnswer& Answer, int32 Code, const FString& Message)> OnEnd;
};

/** Owns the sidecar. It starts and ends with the game instance; what happens is told on the game thread, in Tick. */
UCLASS()
class FRAMESHARD_API UFrameshardSubsystem : public UGameInstanceSubsystem, public FTickableGameObject
{
	GENERATED_BODY()

public:
	/** The model is loaded. What is asked before waits. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardHappened OnReady;

	/** There is no sidecar: it could not start or has ended. Questions that were open have failed. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardError OnError;

	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardBudgetChanged OnBudgetChanged;

	/** What the sidecar says about its VRAM without being asked. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardNoticed OnNotice;

	/** Starts a sidecar as the project settings say; returns at once. OnReady or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Launch();

	/** Joins a sidecar that runs, by its connect file. OnReady or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Connect(const FString& ConnectFile);

	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Close();

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsReady() const;

	/** Whether the sidecar supports a feature, a name from PROTOCOL.md ("Features"); false before OnReady. */
	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool HasFeature(const FString& Feature) const;

	/** All that the sidecar holds in VRAM has to fit into so many MiB; 0: no limit. OnBudgetChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetVramBudget(double Megabytes);

	/** Proposes a lease: a budget, a state, a floor for idle times. OnBudgetChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetLease(const FFrameshardLease& Lease);

	/** Whose work on the GPU comes first, and a limit for all answers together (0.1 to 10,000 tokens/s; 0: none). */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetPacing(EFrameshardSchedulingMode Scheduling, double TargetTokensPerSecond);

	/** Clears the history of a conversation, after the questions that were asked before. Its persona stays. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Forget(const FString& Conversation);

	/** For C++. Returns 0 and the number of the job, or the protocol's code with the reason in Error; then nothing is
	 * called. */
	int32 Ask(
		const FString& Text, const FFrameshardAskParams& Params, FFrameshardListener Listener, int64& Job, FString& Error);

	/** Ends an answer early. */
	void Cancel(int64 Job);

	/** For C++. Done, code 0: Budget is in force; else nothing has changed, and Message says why. Decided comes before
	 * it, unless the lease is refused at once, and may be empty. */
	void RequestLease(const FFrameshardLease& Lease,
		std::function<void(const FFrameshardBudget& Budget, int32 Code, const FString& Message)> Done,
		std::function<void(const FFrameshardDecision& Decision)> Decided = {});

	virtual void Initialize(FSubsystemCollectionBase& Collection) override;
	virtual void Deinitialize() override;

	virtual void Tick(float DeltaTime) override;
	virtual ETickableTickType GetTickableTickType() const override;
	virtual bool IsTickableWhenPaused() const override;
	virtual bool IsTickableInEditor() const override;
	virtual TStatId GetStatId() const override;

private:
	void Report(int32 Status);

	/** Shared, since the type is complete in one file only. */
	std::shared_ptr<frameshard::Game> Game;
};
