#pragma once

#include "CoreMinimal.h"
#include "Subsystems/GameInstanceSubsystem.h"
#include "Tickable.h"

#include "FrameshardTypes.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "FrameshardSubsystem.generated.h"

namespace frameshard
{
class Game;
}
struct fs_client;
struct fs_event;
struct fs_job_options;

/** Callbacks for one answer, for C++. Each may be empty. OnEnd is the last call. */
struct FFrameshardListener
{
	std::function<void(const FString& Text)> OnToken;
	std::function<void(const FString& Sentence)> OnSentence;
	/** Only for a question whose Thinking is Shown. */
	std::function<void(const FString& Piece)> OnThought;
	/** Called with each call of a tool, when it is whole. Arguments is JSON that matches the tool's schema. */
	std::function<void(const FString& Name, const FString& Arguments, const FString& CallId)> OnToolCall;
	/** Only for a question with images. */
	std::function<void(const FFrameshardProgress& Progress)> OnProgress;
	/** True: a question of higher priority has its place. False: it continues. */
	std::function<void(bool bPaused)> OnPaused;
	/** Code 0: the answer is complete. Otherwise Code is the protocol's error code and Message a sentence about it. */
	std::function<void(const FFrameshardAnswer& Answer, int32 Code, const FString& Message)> OnEnd;
};

/** Owns the sidecar, which starts and ends with the game instance. Delegates are called on the game thread, in Tick. A
 * dedicated server has none. */
UCLASS()
class FRAMESHARD_API UFrameshardSubsystem : public UGameInstanceSubsystem, public FTickableGameObject
{
	GENERATED_BODY()

public:
	/** Called when the model is loaded. Questions asked before wait for it. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardHappened OnReady;

	/** Called when a request was refused, or when the sidecar could not start or has ended; then its open questions
	 * have failed. Errors of a call come in the next Tick; what a listener causes comes in the Tick after that. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardError OnError;

	/** Called when a change of the VRAM budget is in force. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardBudgetChanged OnBudgetChanged;

	/** Called when a LoRA adapter was loaded or unloaded. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardAdaptersChanged OnAdaptersChanged;

	/** Called with news about VRAM and the lease. The game need not react. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardNoticed OnNotice;

	/** Called with the progress of a load: before OnReady if Loading is "on" in the project settings, and when an engine
	 * starts again. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardLoaded OnLoading;

	/** Called when the engine process has changed its state. Message says why it is Off. An engine that is off may come
	 * back. After a restart, answers go on. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardEngineChanged OnEngine;

	/** Called when SaveKv has written a file or LoadKv has read one. */
	UPROPERTY(BlueprintAssignable, Category = "frameshard")
	FFrameshardKvDone OnKv;

	/** Starts a sidecar with the options of the project settings. Returns at once. OnReady or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Launch();

	/** Connects to a running sidecar by the path of its connect file, which may be relative to the project's Saved folder.
	 * OnReady or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Connect(const FString& ConnectFile);

	/** Ends the session, and the sidecar if this session has launched it. OnError is called for each request of SaveKv,
	 * LoadKv, LoadAdapter and UnloadAdapter that has no answer yet. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Close();

	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool IsReady() const;

	/** True if the sidecar supports a feature, a name from PROTOCOL.md ("Features"). False before OnReady. */
	UFUNCTION(BlueprintPure, Category = "frameshard")
	bool HasFeature(const FString& Feature) const;

	/** Base URL of OpenAI's HTTP interface. Empty before OnReady, and unless Http is set in the project settings. */
	UFUNCTION(BlueprintPure, Category = "frameshard")
	FString GetHttpUrl() const;

	/** Key for HTTP requests (`Authorization: Bearer`). Keep it secret. */
	UFUNCTION(BlueprintPure, Category = "frameshard")
	FString GetHttpKey() const;

	/** Limits all VRAM that the sidecar uses to Megabytes (MiB); 0: no limit. OnBudgetChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetVramBudget(double Megabytes);

	/** Proposes a lease: a VRAM budget, a state, and a floor for idle times. OnBudgetChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetLease(const FFrameshardLease& Lease);

	/** Sets how the GPU is shared with frames. TargetTokensPerSecond limits all answers together, 0.1 to 10,000; 0: no
	 * limit. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SetPacing(EFrameshardSchedulingMode Scheduling, double TargetTokensPerSecond);

	/** What was said in a conversation, with calls of tools and their results, oldest first. An open answer is in it as
	 * far as it came. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	TArray<FFrameshardMessage> History(const FString& Conversation);

	/** Loads a LoRA adapter from a GGUF file, whose path may be relative to the project's Content folder. Questions may
	 * then use it. OnAdaptersChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void LoadAdapter(const FString& Adapter, const FString& File);

	/** Unloads a LoRA adapter. Refused while a question uses it. OnAdaptersChanged or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void UnloadAdapter(const FString& Adapter);

	/** Clears the history of a conversation, once the questions asked before this call are answered. Its persona
	 * stays. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void Forget(const FString& Conversation);

	/** The history of a conversation as bytes, for a USaveGame: kilobytes, 1 MiB at most. Empty if there is no sidecar;
	 * then OnError is called. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	TArray<uint8> Save(const FString& Conversation);

	/** Replaces a conversation by saved bytes, once the questions asked before this call are answered. Returns false if
	 * nothing was loaded, because the bytes are damaged, too large, of a newer format, or no save; then OnError is
	 * called. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	bool Load(const TArray<uint8>& Data, const FString& Conversation, FFrameshardLoadResult& Result);

	/** Has the sidecar write the KV cache of a conversation to a file, whose path may be relative to the project's Saved
	 * folder, so that after Load and LoadKv its next question
	 * need not read the whole text again. OnKv or OnError follows. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void SaveKv(const FString& Conversation, const FString& File);

	/** Has the sidecar read a file of SaveKv. OnKv or OnError follows; ask the conversation's next question after that.
	 * A file that is damaged, or of another model, device, mode or version, is not used. */
	UFUNCTION(BlueprintCallable, Category = "frameshard")
	void LoadKv(const FString& File, const FString& Conversation);

	/** For C++. Returns 0 and sets Job to the number of the job. On failure it returns the protocol's error code, sets
	 * Error to the reason and never calls Listener. */
	int32 Ask(
		const FString& Text, const FFrameshardAskParams& Params, FFrameshardListener Listener, int64& Job, FString& Error);

	/** For C++. Has the model go on after an answer with calls of tools. Results has the result of each call by its
	 * CallId. Params must name the conversation, and the Tools again if the model may call further ones. Returns as Ask
	 * does. */
	int32 ToolResults(const TMap<FString, FString>& Results, const FFrameshardAskParams& Params,
		FFrameshardListener Listener, int64& Job, FString& Error);

	/** Ends an answer early. */
	void Cancel(int64 Job);

	/** Changes the priority of an answer: 0 for background, 1 for normal, 2 for urgent. Takes effect at once. */
	void SetPriority(int64 Job, int32 Priority);

	/** For C++. Counts the tokens of a prompt, and those that still fit into the context behind it. Done is called once,
	 * not within this call. Code 0: the counts are valid. FS_CANCELLED: the session was closed before. */
	void CountTokens(const FString& Prompt,
		std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done);

	/** For C++. Likewise for messages of a chat, such as those of History, and tools, which its prompt describes. */
	void CountChatTokens(const TArray<FFrameshardMessage>& Messages, const TArray<FFrameshardTool>& Tools,
		std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done);

	/** For C++. Asks the sentence encoder (setting Embedder) for the embeddings of 1 to 64 texts. Rows has NDim numbers
	 * for each text, whose squares add up to 1. Texts of similar meaning have rows with a large dot product. Done is
	 * called once, not within this call. Code 0: the rows are valid. FS_CANCELLED: the session was closed before. */
	void Embed(const TArray<FString>& Texts,
		std::function<void(const TArray<float>& Rows, int32 NDim, int32 Code, const FString& Message)> Done);

	/** For C++. Done is called once, not within this call. Code 0: Budget is in force. Otherwise Code is the protocol's error code and
	 * Message the reason. Decided is called before Done, unless the lease is refused at once; it may be empty. */
	void RequestLease(const FFrameshardLease& Lease,
		std::function<void(const FFrameshardBudget& Budget, int32 Code, const FString& Message)> Done,
		std::function<void(const FFrameshardDecision& Decision)> Decided = {});

	/** Runs Call in the next Tick, so that a listener that tries again does not call itself. */
	void Later(std::function<void()> Call);

	virtual bool ShouldCreateSubsystem(UObject* Outer) const override;
	virtual void Initialize(FSubsystemCollectionBase& Collection) override;
	virtual void Deinitialize() override;

	virtual void Tick(float DeltaTime) override;
	virtual ETickableTickType GetTickableTickType() const override;
	virtual bool IsTickableWhenPaused() const override;
	virtual bool IsTickableInEditor() const override;
	virtual TStatId GetStatId() const override;

private:
	void Hear(const fs_event& Event);

	/** Takes the result of a launch or connection. */
	void Began(int32 Status);

	/** Calls OnError in the next Tick, with the library's last error, unless Status is FS_OK. */
	void Report(int32 Status);
	void Fail(const FString& Message, int32 Code);

	/** Runs what was given to Later before this call. */
	void CallDue();

	/** Reports that the session of Requests was closed. */
	void ForgetRequests();

	/** Why there is no session. */
	FString NoSidecar() const;

	/** The open session; nullptr, after Fail: there is none. */
	fs_client* Session();

	/** Makes a request that is answered by an event. */
	void Request(const std::function<int32(fs_client* Client, uint64_t* Number)>& Call, const FString& File);

	/** Asks for a count by Call. */
	void Count(const std::function<int32(std::function<void(const fs_event& Event)> Counted)>& Call,
		std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done);

	/** Starts a job by Call, with the options of Params. */
	int32 Start(const std::function<int32(const fs_job_options& Options, uint64_t& Number)>& Call,
		const FFrameshardAskParams& Params, int64& Job, FString& Error);

	/** The files of SaveKv, LoadKv and LoadAdapter, and nothing for UnloadAdapter, by request. They have no answer yet. */
	std::map<uint64_t, FString> Requests;

	/** Why the last sidecar could not start or has ended. */
	FString LastReason;

	std::vector<std::function<void()>> Due;

	/** A shared_ptr, because unique_ptr would need the complete type in this header. */
	std::shared_ptr<frameshard::Game> Game;
};
