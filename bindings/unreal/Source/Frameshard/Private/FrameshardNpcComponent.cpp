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
	Start([&Text](UFrameshardSubsystem& Sidecar, const FFrameshardAskParams& Asked, FFrameshardListener Listener,
			  int64& Started, FString& Error)
		{ return Sidecar.Ask(Text, Asked, std::move(Listener), Started, Error); });
}

void UFrameshardNpcComponent::GiveToolResults(const TMap<FString, FString>& Results)
{
	if (IsSpeaking()) // its end may be polled already, so the library does not always refuse this
	{
		Fail(TEXT("the answer with the calls has not ended"), FS_BAD_ARGUMENT);
		return;
	}
	Start([&Results](UFrameshardSubsystem& Sidecar, const FFrameshardAskParams& Asked, FFrameshardListener Listener,
			  int64& Started, FString& Error)
		{ return Sidecar.ToolResults(Results, Asked, std::move(Listener), Started, Error); });
}

void UFrameshardNpcComponent::Start(const std::function<int32(UFrameshardSubsystem& Sidecar,
		const FFrameshardAskParams& Asked, FFrameshardListener Listener, int64& Started, FString& Error)>& Call)
{
	UFrameshardSubsystem* Sidecar = SidecarOf(*this);
	if (!Sidecar)
	{
		Fail(TEXT("there is no game instance with a sidecar"), FS_CONNECTION_LOST);
		return;
	}
	FFrameshardAskParams Asked = Params;
	Asked.Conversation = GetConversation();

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
	Listener.OnToolCall = [Listening](const FString& Name, const FString& Arguments, const FString& CallId)
	{
		if (UFrameshardNpcComponent* Self = Listening())
		{
			Self->OnToolCall.Broadcast(Name, Arguments, CallId);
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
	int64 Started = 0;
	FString Error;
	const int32 Code = Call(*Sidecar, Asked, std::move(Listener), Started, Error);
	if (Code == FS_OK)
	{
		Job = Started;
	}
	else
	{
		Fail(Error, Code);
	}
}

void UFrameshardNpcComponent::Fail(const FString& Message, int32 Code)
{
	const TWeakObjectPtr<UFrameshardNpcComponent> Weak(this);
	auto Tell = [Weak, Message, Code]
	{
		if (UFrameshardNpcComponent* Self = Weak.Get())
		{
			Self->OnError.Broadcast(Message, Code);
		}
	};
	if (UFrameshardSubsystem* Sidecar = SidecarOf(*this))
	{
		Sidecar->Later(Tell);
	}
	else if (!bTelling) // a listener that asks again is being told already
	{
		bTelling = true;
		Tell();
		if (Weak.IsValid())
		{
			bTelling = false;
		}
	}
}

FString UFrameshardNpcComponent::GetConversation() const
{
	if (!Params.Conversation.IsEmpty() || !GetOwner())
	{
		return Params.Conversation;
	}
	return UWorld::RemovePIEPrefix(GetOwner()->GetPathName()); // names are unique only within a level
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
