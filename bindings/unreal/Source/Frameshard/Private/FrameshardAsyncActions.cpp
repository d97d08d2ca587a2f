#include "FrameshardAsyncActions.h"

#include "Engine/Engine.h"
#include "Engine/GameInstance.h"
#include "Engine/World.h"

#include "FrameshardSubsystem.h"

#include <frameshard.h>

namespace
{
UFrameshardSubsystem* SidecarOf(UObject* WorldContextObject)
{
	UWorld* World = GEngine->GetWorldFromContextObject(WorldContextObject, EGetWorldErrorMode::LogAndReturnNull);
	UGameInstance* Instance = World ? World->GetGameInstance() : nullptr;
	return Instance ? Instance->GetSubsystem<UFrameshardSubsystem>() : nullptr;
}

const TCHAR* const NoGame = TEXT("there is no game instance with a sidecar");
}

UFrameshardAskAsync* UFrameshardAskAsync::AskFrameshard(
	UObject* WorldContextObject, const FString& Text, const FFrameshardAskParams& Params)
{
	UFrameshardAskAsync* Node = NewObject<UFrameshardAskAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->Question = Text;
	Node->AskParams = Params;
	Node->RegisterWithGameInstance(WorldContextObject); // keeps the node alive until SetReadyToDestroy
	return Node;
}

UFrameshardAskAsync* UFrameshardAskAsync::GiveFrameshardToolResults(
	UObject* WorldContextObject, const TMap<FString, FString>& Results, const FFrameshardAskParams& Params)
{
	UFrameshardAskAsync* Node = AskFrameshard(WorldContextObject, FString(), Params);
	Node->bGivesResults = true;
	Node->Given = Results;
	return Node;
}

void UFrameshardAskAsync::Activate()
{
	const TWeakObjectPtr<UFrameshardAskAsync> Weak(this);
	FFrameshardListener Listener;
	Listener.OnToken = [Weak](const FString& Piece)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnToken.Broadcast(Piece);
		}
	};
	Listener.OnSentence = [Weak](const FString& Sentence)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnSentence.Broadcast(Sentence);
		}
	};
	Listener.OnProgress = [Weak](const FFrameshardProgress& Progress)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnProgress.Broadcast(Progress);
		}
	};
	Listener.OnThought = [Weak](const FString& Piece)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnThought.Broadcast(Piece);
		}
	};
	Listener.OnToolCall = [Weak](const FString& Name, const FString& Arguments, const FString& CallId)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnToolCall.Broadcast(Name, Arguments, CallId);
		}
	};
	Listener.OnPaused = [Weak](bool bPaused)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnPaused.Broadcast(bPaused);
		}
	};
	Listener.OnEnd = [Weak](const FFrameshardAnswer& Answer, int32 Code, const FString& Message)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->Job = 0; // a later session may have a job of this number
			if (Code == FS_OK)
			{
				Self->OnCompleted.Broadcast(Answer);
			}
			else
			{
				Self->OnFailed.Broadcast(Message, Code);
			}
			Self->SetReadyToDestroy();
		}
	};
	FString Error = NoGame;
	int32 Code = FS_CONNECTION_LOST;
	if (Sidecar.IsValid())
	{
		Code = bGivesResults ? Sidecar->ToolResults(Given, AskParams, std::move(Listener), Job, Error)
		                     : Sidecar->Ask(Question, AskParams, std::move(Listener), Job, Error);
	}
	if (Code == FS_OK)
	{
		return;
	}
	auto Tell = [Weak, Error, Code]
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
			Self->OnFailed.Broadcast(Error, Code);
			Self->SetReadyToDestroy();
		}
	};
	if (Sidecar.IsValid())
	{
		Sidecar->Later(Tell);
	}
	else
	{
		Tell();
	}
}

void UFrameshardAskAsync::Cancel()
{
	if (Sidecar.IsValid() && Job != 0)
	{
		Sidecar->Cancel(Job);
	}
}

void UFrameshardAskAsync::SetPriority(int32 Priority)
{
	if (Sidecar.IsValid() && Job != 0)
	{
		Sidecar->SetPriority(Job, Priority);
	}
}

UFrameshardEmbedAsync* UFrameshardEmbedAsync::EmbedFrameshardTexts(
	UObject* WorldContextObject, const TArray<FString>& Texts)
{
	UFrameshardEmbedAsync* Node = NewObject<UFrameshardEmbedAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->Embedded = Texts;
	Node->RegisterWithGameInstance(WorldContextObject);
	return Node;
}

void UFrameshardEmbedAsync::Activate()
{
	const TWeakObjectPtr<UFrameshardEmbedAsync> Weak(this);
	auto Done = [Weak](const TArray<float>& Rows, int32 NDim, int32 Code, const FString& Message)
	{
		if (UFrameshardEmbedAsync* Self = Weak.Get())
		{
			if (Code == FS_OK)
			{
				Self->OnEmbedded.Broadcast(Rows, NDim);
			}
			else
			{
				Self->OnFailed.Broadcast(Message, Code);
			}
			Self->SetReadyToDestroy();
		}
	};
	if (Sidecar.IsValid())
	{
		Sidecar->Embed(Embedded, Done);
	}
	else
	{
		Done({}, 0, FS_CONNECTION_LOST, NoGame);
	}
}

UFrameshardCountTokensAsync* UFrameshardCountTokensAsync::CountFrameshardTokens(
	UObject* WorldContextObject, const FString& Prompt)
{
	UFrameshardCountTokensAsync* Node = NewObject<UFrameshardCountTokensAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->Counted = Prompt;
	Node->RegisterWithGameInstance(WorldContextObject);
	return Node;
}

UFrameshardCountTokensAsync* UFrameshardCountTokensAsync::CountFrameshardChatTokens(
	UObject* WorldContextObject, const TArray<FFrameshardMessage>& Messages, const TArray<FFrameshardTool>& Tools)
{
	UFrameshardCountTokensAsync* Node = CountFrameshardTokens(WorldContextObject, FString());
	Node->bCountsMessages = true;
	Node->CountedMessages = Messages;
	Node->CountedTools = Tools;
	return Node;
}

void UFrameshardCountTokensAsync::Activate()
{
	const TWeakObjectPtr<UFrameshardCountTokensAsync> Weak(this);
	auto Done = [Weak](int32 NTokens, int32 NLeft, int32 Code, const FString& Message)
	{
		if (UFrameshardCountTokensAsync* Self = Weak.Get())
		{
			if (Code == FS_OK)
			{
				Self->OnCounted.Broadcast(NTokens, NLeft);
			}
			else
			{
				Self->OnFailed.Broadcast(Message, Code);
			}
			Self->SetReadyToDestroy();
		}
	};
	if (Sidecar.IsValid() && bCountsMessages)
	{
		Sidecar->CountChatTokens(CountedMessages, CountedTools, Done);
	}
	else if (Sidecar.IsValid())
	{
		Sidecar->CountTokens(Counted, Done);
	}
	else
	{
		Done(0, 0, FS_CONNECTION_LOST, NoGame);
	}
}

UFrameshardSetLeaseAsync* UFrameshardSetLeaseAsync::SetFrameshardLease(
	UObject* WorldContextObject, const FFrameshardLease& Lease)
{
	UFrameshardSetLeaseAsync* Node = NewObject<UFrameshardSetLeaseAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->Proposed = Lease;
	Node->RegisterWithGameInstance(WorldContextObject);
	return Node;
}

UFrameshardSetLeaseAsync* UFrameshardSetLeaseAsync::SetFrameshardVramBudget(
	UObject* WorldContextObject, double Megabytes)
{
	FFrameshardLease Lease;
	Lease.VramBudgetMb = Megabytes;
	return SetFrameshardLease(WorldContextObject, Lease);
}

void UFrameshardSetLeaseAsync::Activate()
{
	const TWeakObjectPtr<UFrameshardSetLeaseAsync> Weak(this);
	auto Decided = [Weak](const FFrameshardDecision& Decision)
	{
		if (UFrameshardSetLeaseAsync* Self = Weak.Get())
		{
			Self->OnDecided.Broadcast(Decision);
		}
	};
	auto Done = [Weak](const FFrameshardBudget& Budget, int32 Code, const FString& Message)
	{
		if (UFrameshardSetLeaseAsync* Self = Weak.Get())
		{
			if (Code == FS_OK)
			{
				Self->OnReleased.Broadcast(Budget);
			}
			else
			{
				Self->OnFailed.Broadcast(Message, Code);
			}
			Self->SetReadyToDestroy();
		}
	};
	if (Sidecar.IsValid())
	{
		Sidecar->RequestLease(Proposed, Done, Decided);
	}
	else
	{
		Done(FFrameshardBudget(), FS_CONNECTION_LOST, NoGame);
	}
}
