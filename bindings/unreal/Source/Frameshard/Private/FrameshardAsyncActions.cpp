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

const TCHAR* const NoGame = TEXT("there is no game instance");
}

UFrameshardAskAsync* UFrameshardAskAsync::AskFrameshard(
	UObject* WorldContextObject, const FString& Text, const FFrameshardAskParams& Params)
{
	UFrameshardAskAsync* Node = NewObject<UFrameshardAskAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->Question = Text;
	Node->AskParams = Params;
	Node->RegisterWithGameInstance(WorldContextObject); // alive until SetReadyToDestroy
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
	Listener.OnEnd = [Weak](const FFrameshardAnswer& Answer, int32 Code, const FString& Message)
	{
		if (UFrameshardAskAsync* Self = Weak.Get())
		{
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
	const int32 Code = Sidecar.IsValid()
		? Sidecar->Ask(Question, AskParams, std::move(Listener), Job, Error) : FS_CONNECTION_LOST;
	if (Code != FS_OK)
	{
		OnFailed.Broadcast(Error, Code);
		SetReadyToDestroy();
	}
}

void UFrameshardAskAsync::Cancel()
{
	if (Sidecar.IsValid() && Job != 0)
	{
		Sidecar->Cancel(Job);
	}
}

UFrameshardSetBudgetAsync* UFrameshardSetBudgetAsync::SetFrameshardVramBudget(
	UObject* WorldContextObject, double Megabytes)
{
	UFrameshardSetBudgetAsync* Node = NewObject<UFrameshardSetBudgetAsync>();
	Node->Sidecar = SidecarOf(WorldContextObject);
	Node->BudgetMb = Megabytes;
	Node->RegisterWithGameInstance(WorldContextObject);
	return Node;
}

void UFrameshardSetBudgetAsync::Activate()
{
	const TWeakObjectPtr<UFrameshardSetBudgetAsync> Weak(this);
	auto Done = [Weak](const FFrameshardBudget& Budget, int32 Code, const FString& Message)
	{
		if (UFrameshardSetBudgetAsync* Self = Weak.Get())
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
		Sidecar->RequestVramBudget(BudgetMb, Done);
	}
	else
	{
		Done(FFrameshardBudget(), FS_CONNECTION_LOST, NoGame);
	}
}
