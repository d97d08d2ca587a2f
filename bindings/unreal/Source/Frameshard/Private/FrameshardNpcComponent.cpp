#include "FrameshardNpcComponent.h"

#include "Engine/GameInstance.h"
#include "Engine/World.h"
#include "GameFramework/Actor.h"

#include "FrameshardSubsystem.h"

#include <frameshard.h>

namespace
{
UFrameshardSubsystem* SidecarOf(const UActorComponent& Component)
{
	const UWorld* World = Component.GetWorld();
	UGameInstance* Instance = World ? World->GetGameInstance() : nullptr;
	return Instance ? Instance->GetSubsystem<UFrameshardSubsystem>() : nullptr;
}
}

void UFrameshardNpcComponent::Ask(const FString& Text)
{
	StopGeneration();
	UFrameshardSubsystem* Sidecar = SidecarOf(*this);
	if (!Sidecar)
	{
		OnError.Broadcast(TEXT("there is no game instance"), FS_CONNECTION_LOST);
		return;
	}
	FFrameshardAskParams Asked = Params;
	if (Asked.Conversation.IsEmpty() && GetOwner())
	{
		Asked.Conversation = GetOwner()->GetName();
	}

	const TWeakObjectPtr<UFrameshardNpcComponent> Weak(this);
	const int32 Mine = Question;
	auto Listening = [Weak, Mine]()
	{
		UFrameshardNpcComponent* Self = Weak.Get();
		return Self && Self->Question == Mine ? Self : nullptr;
	};
	FFrameshardListener Listener;
	Listener.OnToken = [Listening](const FString& Piece)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnTokenGenerated.Broadcast(Piece);
		}
	};
	Listener.OnSentence = [Listening](const FString& Sentence)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnSentenceGenerated.Broadcast(Sentence);
		}
	};
	Listener.OnProgress = [Listening](const FFrameshardProgress& Progress)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnProgress.Broadcast(Progress);
		}
	};
	Listener.OnThought = [Listening](const FString& Piece)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnThought.Broadcast(Piece);
		}
	};
	Listener.OnPaused = [Listening](bool bPaused)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnPaused.Broadcast(bPaused);
		}
	};
	Listener.OnEnd = [Listening](const FFrameshardAnswer& Answer, int32 Code, const FString& Message)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->Job = 0;
			if (Code == FS_OK)
			{
				Self->OnResponseGenerated.Broadcast(Answer);
			}
			else
			{
				Self->OnError.Broadcast(Message, Code);
			}
		}
	};
	FString Error;
	const int32 Code = Sidecar->Ask(Text, Asked, std::move(Listener), Job, Error);
	if (Code != FS_OK)
	{
		OnError.Broadcast(Error, Code);
	}
}

void UFrameshardNpcComponent::StopGeneration()
{
	++Question;
	const int64 Stopped = Job;
	Job = 0;
	UFrameshardSubsystem* Sidecar = Stopped != 0 ? SidecarOf(*this) : nullptr;
	if (Sidecar)
	{
		Sidecar->Cancel(Stopped);
	}
}

void UFrameshardNpcComponent::SetPriority(int32 Priority)
{
	UFrameshardSubsystem* Sidecar = Job != 0 ? SidecarOf(*this) : nullptr;
	if (Sidecar)
	{
		Sidecar->SetPriority(Job, Priority);
	}
}

bool UFrameshardNpcComponent::IsSpeaking() const
{
	return Job != 0;
}

void UFrameshardNpcComponent::EndPlay(const EEndPlayReason::Type EndPlayReason)
{
	StopGeneration();
	Super::EndPlay(EndPlayReason);
}
