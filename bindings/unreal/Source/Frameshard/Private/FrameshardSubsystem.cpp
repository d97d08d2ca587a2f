#include "FrameshardSubsystem.h"

#include "Misc/Paths.h"

#include "FrameshardSettings.h"
#include "FrameshardText.h"

#include <frameshard_game.hpp>

DEFINE_LOG_CATEGORY_STATIC(LogFrameshard, Log, All);

namespace
{
constexpr double BytesPerMb = 1024.0 * 1024.0;
constexpr double BudgetSeconds = 5;
const TCHAR* const NoSidecar = TEXT("there is no sidecar: Launch it");

/** UTF-8 of a path that may begin in the project's Content folder. */
std::string ContentPath(const FString& Path)
{
	const FString Content = FPaths::ConvertRelativePathToFull(FPaths::ProjectContentDir());
	return FrameshardUtf8(FPaths::ConvertRelativePathToFull(Content, Path));
}

FString LastError()
{
	uint32_t Length = 0;
	const char* Text = fs_last_error(&Length);
	return FrameshardText(std::string_view(Text, Length));
}
}

void UFrameshardSubsystem::Initialize(FSubsystemCollectionBase& Collection)
{
	Super::Initialize(Collection);
	Game = std::make_shared<frameshard::Game>();
	Game->on_ready = [this](const fs_model&) { OnReady.Broadcast(); };
	Game->on_closed = [this](fs_status Status, std::string_view Message)
	{
		UE_LOG(LogFrameshard, Error, TEXT("%s"), *FrameshardText(Message));
		OnError.Broadcast(FrameshardText(Message), Status);
	};
	if (GetDefault<UFrameshardSettings>()->bLaunchAtStart)
	{
		Launch();
	}
}

void UFrameshardSubsystem::Deinitialize()
{
	Close();
	Game.reset();
	Super::Deinitialize();
}

void UFrameshardSubsystem::Launch()
{
	const UFrameshardSettings* Settings = GetDefault<UFrameshardSettings>();
	const std::string Model = ContentPath(Settings->Model);
	const std::string Device = FrameshardUtf8(Settings->Device);
	const std::string Python = Settings->Python.IsEmpty() ? std::string() : ContentPath(Settings->Python);
	fs_launch_options Options;
	fs_launch_options_init(&Options, sizeof Options);
	Options.model = Model.c_str();
	Options.device = Device.c_str();
	Options.vram_budget_bytes = static_cast<uint64_t>(Settings->VramBudgetMb * BytesPerMb);
	Options.n_ctx = static_cast<uint32_t>(Settings->ContextTokens);
	Options.n_parallel = static_cast<uint32_t>(Settings->Parallel);
	Options.client_name = "unreal";
	if (!Python.empty())
	{
		Options.python = Python.c_str();
	}
	Game->keep_out_of_frames(Settings->TargetFrameMs / 1000);
	Report(Game->launch(Options));
}

void UFrameshardSubsystem::Connect(const FString& ConnectFile)
{
	Game->keep_out_of_frames(GetDefault<UFrameshardSettings>()->TargetFrameMs / 1000);
	Report(Game->connect(FrameshardUtf8(ConnectFile).c_str(), "unreal"));
}

void UFrameshardSubsystem::Close()
{
	if (Game)
	{
		Game->close(GetDefault<UFrameshardSettings>()->CloseSeconds);
	}
}

bool UFrameshardSubsystem::IsReady() const
{
	return Game && Game->is_ready();
}

void UFrameshardSubsystem::Report(int32 Status)
{
	if (Status != FS_OK)
	{
		const FString Message = LastError();
		UE_LOG(LogFrameshard, Error, TEXT("%s"), *Message);
		OnError.Broadcast(Message, Status);
	}
}

void UFrameshardSubsystem::SetVramBudget(double Megabytes)
{
	RequestVramBudget(Megabytes,
		[this](const FFrameshardBudget&, int32 Code, const FString& Message)
		{
			if (Code != FS_OK && Code != FS_CANCELLED)
			{
				OnError.Broadcast(Message, Code);
			}
		});
}

void UFrameshardSubsystem::RequestVramBudget(
	double Megabytes, std::function<void(const FFrameshardBudget&, int32, const FString&)> Done)
{
	if (!Game || !Game->client())
	{
		Done(FFrameshardBudget(), FS_CONNECTION_LOST, NoSidecar);
		return;
	}
	const fs_status Status = Game->set_budget(static_cast<uint64_t>(Megabytes * BytesPerMb), BudgetSeconds,
		[this, Done](const frameshard::BudgetResult& Result)
		{
			FFrameshardBudget Budget;
			Budget.BudgetMb = static_cast<double>(Result.budget_bytes) / BytesPerMb;
			Budget.UsedMb = static_cast<double>(Result.used_bytes) / BytesPerMb;
			Budget.Seconds = Result.seconds;
			Done(Budget, Result.status, FrameshardText(Result.message));
			if (Result.status == FS_OK)
			{
				OnBudgetChanged.Broadcast(Budget);
			}
		});
	if (Status != FS_OK)
	{
		Done(FFrameshardBudget(), Status, LastError());
	}
}

int32 UFrameshardSubsystem::Ask(
	const FString& Text, const FFrameshardAskParams& Params, FFrameshardListener Listener, int64& Job, FString& Error)
{
	Job = 0;
	if (!Game || !Game->client())
	{
		Error = NoSidecar;
		return FS_CONNECTION_LOST;
	}
	const std::string Conversation = FrameshardUtf8(Params.Conversation);
	const std::string Persona = FrameshardUtf8(Params.Persona);
	fs_sampling Sampling;
	fs_sampling_init(&Sampling, sizeof Sampling);
	Sampling.max_tokens = Params.MaxTokens;
	Sampling.temperature = Params.Temperature;
	Sampling.seed = Params.Seed < 0 ? -1 : Params.Seed;
	fs_job_options Options;
	fs_job_options_init(&Options, sizeof Options);
	Options.conversation = Conversation.empty() ? nullptr : Conversation.c_str();
	Options.system = Persona.empty() ? nullptr : Persona.c_str();
	Options.sampling = &Sampling;

	frameshard::Listener Inner;
	if (Listener.OnToken)
	{
		Inner.on_text = [OnToken = std::move(Listener.OnToken)](std::string_view Piece) { OnToken(FrameshardText(Piece)); };
	}
	if (Listener.OnSentence)
	{
		Inner.on_sentence = [OnSentence = std::move(Listener.OnSentence)](std::string_view Sentence)
		{ OnSentence(FrameshardText(Sentence)); };
	}
	if (Listener.OnEnd)
	{
		Inner.on_end = [OnEnd = std::move(Listener.OnEnd)](const frameshard::Ending& Ending)
		{
			FFrameshardAnswer Answer;
			Answer.Text = FrameshardText(Ending.text);
			Answer.PromptTokens = static_cast<int32>(Ending.n_prompt);
			Answer.GeneratedTokens = static_cast<int32>(Ending.n_generated);
			Answer.PrefillSeconds = Ending.prefill_s;
			Answer.DecodeSeconds = Ending.decode_s;
			OnEnd(Answer, Ending.status, FrameshardText(Ending.message));
		};
	}
	uint64_t Number = 0;
	const fs_status Status = Game->ask(FrameshardUtf8(Text), Options, std::move(Inner), &Number);
	Job = static_cast<int64>(Number);
	if (Status != FS_OK)
	{
		Error = LastError();
	}
	return Status;
}

void UFrameshardSubsystem::Cancel(int64 Job)
{
	if (Game)
	{
		Game->cancel(static_cast<uint64_t>(Job)); // one that has ended meanwhile needs nothing
	}
}

void UFrameshardSubsystem::Tick(float)
{
	if (Game)
	{
		Game->pump(GetDefault<UFrameshardSettings>()->EventsPerFrame);
	}
}

ETickableTickType UFrameshardSubsystem::GetTickableTickType() const
{
	return IsTemplate() ? ETickableTickType::Never : ETickableTickType::Always;
}

bool UFrameshardSubsystem::IsTickableWhenPaused() const
{
	return true; // or the sidecar would take the game for gone
}

bool UFrameshardSubsystem::IsTickableInEditor() const
{
	return true;
}

TStatId UFrameshardSubsystem::GetStatId() const
{
	RETURN_QUICK_DECLARE_CYCLE_STAT(UFrameshardSubsystem, STATGROUP_Tickables);
}
