#include "FrameshardSubsystem.h"

#include "Engine/GameInstance.h"

#include "FrameshardOptions.h"
#include "FrameshardSettings.h"

#include <frameshard_game.hpp>

#include <algorithm>
#include <utility>

DEFINE_LOG_CATEGORY_STATIC(LogFrameshard, Log, All);

namespace
{
const TCHAR* const Closed = TEXT("the session was closed");

FString LastError()
{
	uint32_t Length = 0;
	const char* Text = fs_last_error(&Length);
	return FrameshardText(std::string_view(Text, Length));
}

/** Images for the C library. They point into Params. */
std::vector<fs_image> ImagesOf(const FFrameshardAskParams& Params)
{
	std::vector<fs_image> Images;
	for (const FFrameshardImage& Image : Params.Images)
	{
		fs_image Made{};
		Made.format = static_cast<uint32_t>(Image.Format);
		Made.width = static_cast<uint32_t>(Image.Width);
		Made.height = static_cast<uint32_t>(Image.Height);
		Made.stride = static_cast<uint32_t>(Image.Stride);
		Made.data = Image.Data.GetData();
		Made.size = static_cast<uint64_t>(Image.Data.Num());
		Images.push_back(Made);
	}
	return Images;
}

/** Makes callbacks for the client library that call those of this plugin. */
frameshard::Listener Wrapped(FFrameshardListener Listener, int64 Timeline)
{
	frameshard::Listener Inner;
	if (Listener.OnToken)
	{
		Inner.on_text = [OnToken = std::move(Listener.OnToken)](std::string_view Piece) { OnToken(FrameshardText(Piece)); };
	}
	if (Listener.OnThought)
	{
		Inner.on_thought = [OnThought = std::move(Listener.OnThought)](std::string_view Piece)
		{ OnThought(FrameshardText(Piece)); };
	}
	if (Listener.OnToolCall)
	{
		Inner.on_tool_call = [OnToolCall = std::move(Listener.OnToolCall)](const frameshard::ToolCall& Call)
		{ OnToolCall(FrameshardText(Call.name), FrameshardText(Call.arguments), FrameshardText(Call.call_id)); };
	}
	if (Listener.OnSentence)
	{
		Inner.on_sentence = [OnSentence = std::move(Listener.OnSentence)](std::string_view Sentence)
		{ OnSentence(FrameshardText(Sentence)); };
	}
	if (Listener.OnProgress)
	{
		Inner.on_progress = [OnProgress = std::move(Listener.OnProgress)](const fs_event& Event)
		{
			FFrameshardProgress Progress;
			Progress.Phase = static_cast<EFrameshardPhase>(Event.phase);
			Progress.Done = static_cast<int32>(Event.done);
			Progress.Total = static_cast<int32>(Event.total);
			OnProgress(Progress);
		};
	}
	Inner.on_paused = std::move(Listener.OnPaused);
	if (Listener.OnEnd)
	{
		Inner.on_end = [OnEnd = std::move(Listener.OnEnd), Timeline](const frameshard::Ending& Ending)
		{
			FFrameshardAnswer Answer;
			Answer.Text = FrameshardText(Ending.text);
			Answer.Reason = static_cast<EFrameshardReason>(Ending.reason);
			Answer.PromptTokens = static_cast<int32>(Ending.n_prompt);
			Answer.GeneratedTokens = static_cast<int32>(Ending.n_generated);
			Answer.ReusedTokens = static_cast<int32>(Ending.n_reused);
			Answer.LeftTokens = static_cast<int32>(Ending.n_left);
			Answer.DroppedQuestions = static_cast<int32>(Ending.n_dropped);
			Answer.ThoughtTokens = static_cast<int32>(Ending.n_thought);
			Answer.PrefillSeconds = Ending.prefill_s;
			Answer.DecodeSeconds = Ending.decode_s;
			Answer.bRemote = Ending.remote;
			Answer.Timeline = Timeline;
			OnEnd(Answer, Ending.status, FrameshardText(Ending.message));
		};
	}
	return Inner;
}
}

void UFrameshardSubsystem::Initialize(FSubsystemCollectionBase& Collection)
{
	Super::Initialize(Collection);
	Game = std::make_shared<frameshard::Game>();
	Game->on_ready = [this](const fs_model&)
	{
		SetPacing(GetDefault<UFrameshardSettings>()->Scheduling, 0);
		OnReady.Broadcast();
	};
	Game->on_event = [this](const fs_event& Event) { Hear(Event); };
	Game->on_closed = [this](fs_status Status, std::string_view Message)
	{
		Requests.clear(); // this error is the answer to all of them
		LastReason = FrameshardText(Message);
		UE_LOG(LogFrameshard, Error, TEXT("%s"), *FrameshardText(Message));
		OnError.Broadcast(FrameshardText(Message), Status);
	};
	if (GetDefault<UFrameshardSettings>()->bLaunchAtStart)
	{
		Launch();
	}
}

bool UFrameshardSubsystem::ShouldCreateSubsystem(UObject* Outer) const
{
	return !CastChecked<UGameInstance>(Outer)->IsDedicatedServerInstance() && Super::ShouldCreateSubsystem(Outer);
}

void UFrameshardSubsystem::Hear(const fs_event& Event)
{
	const FString Text = FrameshardText(std::string_view(Event.text, Event.text_length));
	if (Event.type == FS_EVENT_NOTICE)
	{
		FFrameshardNotice Notice;
		Notice.Kind = static_cast<EFrameshardNoticeKind>(Event.notice);
		Notice.BudgetMb = FrameshardMegabytes(Event.budget_bytes);
		Notice.Seconds = Event.seconds;
		Notice.HostBudgetMb = FrameshardMegabytes(Event.host_budget_bytes);
		Notice.Text = Text;
		OnNotice.Broadcast(Notice);
	}
	else if (Event.type == FS_EVENT_LOADING)
	{
		FFrameshardLoading Loading;
		Loading.Stage = static_cast<EFrameshardLoadingStage>(Event.stage);
		Loading.Done = static_cast<int32>(Event.done);
		Loading.Total = static_cast<int32>(Event.total);
		OnLoading.Broadcast(Loading);
	}
	else if (Event.type == FS_EVENT_ENGINE)
	{
		OnEngine.Broadcast(
			static_cast<EFrameshardEngineState>(Event.engine_state), static_cast<int32>(Event.restarts), Text);
	}
	else if (Event.type == FS_EVENT_ADAPTERS)
	{
		Requests.erase(Event.request);
		OnAdaptersChanged.Broadcast(FrameshardText(std::string_view(Event.detail, Event.detail_length)),
			FrameshardMegabytes(Event.floor_bytes));
	}
	else if (Event.type == FS_EVENT_KV)
	{
		FFrameshardKv Kv;
		Kv.File = Requests[Event.request];
		Kv.NTokens = static_cast<int32>(Event.n_tokens);
		Kv.FileBytes = static_cast<int64>(Event.file_bytes);
		Kv.WhyNone = Text;
		Requests.erase(Event.request);
		OnKv.Broadcast(Kv);
	}
	else if (Event.type == FS_EVENT_REFUSED) // for requests that have no callback of their own
	{
		Requests.erase(Event.request);
		OnError.Broadcast(Text, Event.status);
	}
}

void UFrameshardSubsystem::Deinitialize()
{
	ForgetRequests();
	// A callback may launch or ask again: there is no session for it any more.
	if (const std::shared_ptr<frameshard::Game> Ended = std::move(Game))
	{
		Ended->close(GetDefault<UFrameshardSettings>()->CloseSeconds);
	}
	CallDue();
	Super::Deinitialize();
}

void UFrameshardSubsystem::Launch()
{
	if (!Game)
	{
		Fail(NoSidecar(), FS_CONNECTION_LOST);
		return;
	}
	ForgetRequests();
	const UFrameshardSettings* Settings = GetDefault<UFrameshardSettings>();
	FFrameshardTexts Texts;
	fs_launch_options Options;
	fs_launch_options_init(&Options, sizeof Options);
	FrameshardFill(Options, *Settings, Texts);
	Options.python = Texts.Path(Settings->Python);
	Options.log_file = Texts.Saved(Settings->LogFile);
	Options.extra_json = Texts.Text(Settings->ExtraJson);
	Options.client_name = "unreal";
	Game->keep_out_of_frames(Settings->TargetFrameMs / 1000);
	Began(Game->launch(Options));
}

void UFrameshardSubsystem::Connect(const FString& ConnectFile)
{
	if (!Game)
	{
		Fail(NoSidecar(), FS_CONNECTION_LOST);
		return;
	}
	ForgetRequests();
	FFrameshardTexts Texts;
	Game->keep_out_of_frames(GetDefault<UFrameshardSettings>()->TargetFrameMs / 1000);
	Began(Game->connect(Texts.Saved(ConnectFile), "unreal"));
}

void UFrameshardSubsystem::Began(int32 Status)
{
	LastReason = Status == FS_OK ? FString() : LastError();
	Report(Status);
}

void UFrameshardSubsystem::Close()
{
	if (Game)
	{
		ForgetRequests();
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
		Fail(LastError(), Status);
	}
}

void UFrameshardSubsystem::Fail(const FString& Message, int32 Code)
{
	UE_LOG(LogFrameshard, Error, TEXT("%s"), *Message);
	Later([this, Message, Code] { OnError.Broadcast(Message, Code); });
}

void UFrameshardSubsystem::Later(std::function<void()> Call)
{
	Due.push_back(std::move(Call));
}

void UFrameshardSubsystem::CallDue()
{
	const std::vector<std::function<void()>> Calls = std::exchange(Due, {});
	for (const std::function<void()>& Call : Calls)
	{
		Call();
	}
}

void UFrameshardSubsystem::ForgetRequests()
{
	const std::map<uint64_t, FString> Open = std::exchange(Requests, {});
	for (size_t Left = Open.size(); Left > 0; --Left)
	{
		Fail(Closed, FS_CANCELLED);
	}
}

FString UFrameshardSubsystem::NoSidecar() const
{
	FString Message = TEXT("there is no sidecar: ");
	Message += LastReason.IsEmpty() ? FString(TEXT("Launch it")) : LastReason;
	return Message;
}

fs_client* UFrameshardSubsystem::Session()
{
	fs_client* Client = Game ? Game->client() : nullptr;
	if (!Client)
	{
		Fail(NoSidecar(), FS_CONNECTION_LOST);
	}
	return Client;
}

bool UFrameshardSubsystem::HasFeature(const FString& Feature) const
{
	return Game && fs_has_feature(Game->client(), FrameshardUtf8(Feature).c_str()) != 0;
}

FString UFrameshardSubsystem::GetHttpUrl() const
{
	fs_model Model{};
	Model.struct_size = sizeof Model;
	return Game && fs_get_model(Game->client(), &Model) == FS_OK ? FrameshardText(Model.http_url) : FString();
}

FString UFrameshardSubsystem::GetHttpKey() const
{
	fs_model Model{};
	Model.struct_size = sizeof Model;
	return Game && fs_get_model(Game->client(), &Model) == FS_OK ? FrameshardText(Model.http_key) : FString();
}

void UFrameshardSubsystem::SetVramBudget(double Megabytes)
{
	FFrameshardLease Lease;
	Lease.VramBudgetMb = Megabytes;
	SetLease(Lease);
}

void UFrameshardSubsystem::SetLease(const FFrameshardLease& Lease)
{
	RequestLease(Lease,
		[this](const FFrameshardBudget&, int32 Code, const FString& Message)
		{
			if (Code != FS_OK && Code != FS_CANCELLED)
			{
				OnError.Broadcast(Message, Code);
			}
		});
}

void UFrameshardSubsystem::RequestLease(const FFrameshardLease& Lease,
	std::function<void(const FFrameshardBudget&, int32, const FString&)> Done,
	std::function<void(const FFrameshardDecision&)> Decided)
{
	if (!Game || !Game->client())
	{
		Later([Done, Message = NoSidecar()] { Done(FFrameshardBudget(), FS_CONNECTION_LOST, Message); });
		return;
	}
	FFrameshardTexts Texts;
	fs_lease Made;
	fs_lease_init(&Made, sizeof Made);
	FrameshardFill(Made, Lease, Texts);
	auto Hear = [Decided](const fs_event& Event)
	{
		FFrameshardDecision Decision;
		Decision.Decision = static_cast<EFrameshardDecision>(Event.decision);
		Decision.BudgetMb = FrameshardMegabytes(Event.budget_bytes);
		Decision.Seconds = Event.seconds;
		Decision.Version = static_cast<int64>(Event.version);
		Decision.HostBudgetMb = FrameshardMegabytes(Event.host_budget_bytes);
		if (Decided)
		{
			Decided(Decision);
		}
	};
	const fs_status Status = Game->set_lease(Made,
		[this, Done](const frameshard::BudgetResult& Result)
		{
			FFrameshardBudget Budget;
			Budget.BudgetMb = FrameshardMegabytes(Result.budget_bytes);
			Budget.UsedMb = FrameshardMegabytes(Result.used_bytes);
			Budget.Seconds = Result.seconds;
			Budget.HostBudgetMb = FrameshardMegabytes(Result.host_budget_bytes);
			Budget.HostUsedMb = FrameshardMegabytes(Result.host_used_bytes);
			Done(Budget, Result.status, FrameshardText(Result.message));
			if (Result.status == FS_OK)
			{
				OnBudgetChanged.Broadcast(Budget);
			}
		},
		Hear);
	if (Status != FS_OK)
	{
		Later([Done, Status, Message = LastError()] { Done(FFrameshardBudget(), Status, Message); });
	}
}

void UFrameshardSubsystem::SetPacing(EFrameshardSchedulingMode Scheduling, double TargetTokensPerSecond)
{
	if (fs_client* Client = Session())
	{
		Report(fs_set_pacing(Client, static_cast<int32_t>(Scheduling), TargetTokensPerSecond, nullptr));
	}
}

TArray<FFrameshardMessage> UFrameshardSubsystem::History(const FString& Conversation)
{
	TArray<FFrameshardMessage> Messages;
	const fs_chat_message* First = nullptr;
	uint32_t Length = 0;
	if (fs_client* Client = Session())
	{
		Report(fs_history_with_tools(Client, FrameshardUtf8(Conversation).c_str(), &First, &Length));
	}
	for (uint32_t Index = 0; Index < Length; ++Index)
	{
		const fs_chat_message& Told = First[Index];
		FFrameshardMessage Message;
		Message.Role = FrameshardText(Told.role);
		Message.Content = FrameshardText(std::string_view(Told.content, static_cast<size_t>(Told.content_length)));
		for (uint32_t At = 0; At < Told.n_tool_calls; ++At)
		{
			FFrameshardToolCall Call;
			Call.CallId = FrameshardText(Told.tool_calls[At].call_id);
			Call.Name = FrameshardText(Told.tool_calls[At].name);
			Call.Arguments = FrameshardText(Told.tool_calls[At].arguments);
			Message.ToolCalls.Add(Call);
		}
		if (Told.tool_call_id)
		{
			Message.ToolCallId = FrameshardText(Told.tool_call_id);
		}
		Messages.Add(Message);
	}
	return Messages;
}

void UFrameshardSubsystem::LoadAdapter(const FString& Adapter, const FString& File)
{
	FFrameshardTexts Texts;
	Request([&](fs_client* Client, uint64_t* Number)
		{ return fs_load_adapter(Client, Texts.Text(Adapter), Texts.Path(File), Number); },
		File);
}

void UFrameshardSubsystem::UnloadAdapter(const FString& Adapter)
{
	Request([&](fs_client* Client, uint64_t* Number)
		{ return fs_unload_adapter(Client, FrameshardUtf8(Adapter).c_str(), Number); },
		FString());
}

void UFrameshardSubsystem::Request(
	const std::function<int32(fs_client* Client, uint64_t* Number)>& Call, const FString& File)
{
	if (fs_client* Client = Session())
	{
		uint64_t Number = 0;
		const fs_status Status = Call(Client, &Number);
		Report(Status);
		if (Status == FS_OK)
		{
			Requests[Number] = File;
		}
	}
}

void UFrameshardSubsystem::Forget(const FString& Conversation)
{
	if (fs_client* Client = Session())
	{
		Report(fs_forget(Client, FrameshardUtf8(Conversation).c_str()));
	}
}

TArray<uint8> UFrameshardSubsystem::Save(const FString& Conversation)
{
	TArray<uint8> Data;
	const void* Bytes = nullptr;
	uint64_t Size = 0;
	if (fs_client* Client = Session())
	{
		Report(fs_save(Client, FrameshardUtf8(Conversation).c_str(), &Bytes, &Size));
	}
	Data.Append(static_cast<const uint8*>(Bytes), static_cast<int32>(Size));
	return Data;
}

bool UFrameshardSubsystem::Load(const TArray<uint8>& Data, const FString& Conversation, FFrameshardLoadResult& Result)
{
	fs_client* Client = Session();
	if (!Client)
	{
		return false;
	}
	fs_load_result Found{};
	Found.struct_size = sizeof Found;
	const fs_status Status = fs_load(Client, Data.GetData(), static_cast<uint64_t>(Data.Num()),
		FrameshardUtf8(Conversation).c_str(), &Found);
	Report(Status);
	Result.bSameModel = Found.same_model != 0;
	Result.bSameTemplate = Found.same_template != 0;
	return Status == FS_OK;
}

void UFrameshardSubsystem::SaveKv(const FString& Conversation, const FString& File)
{
	FFrameshardTexts Texts;
	Request([&](fs_client* Client, uint64_t* Number)
		{ return fs_save_kv(Client, FrameshardUtf8(Conversation).c_str(), Texts.Saved(File), Number); },
		File);
}

void UFrameshardSubsystem::LoadKv(const FString& File, const FString& Conversation)
{
	FFrameshardTexts Texts;
	Request([&](fs_client* Client, uint64_t* Number)
		{ return fs_load_kv(Client, Texts.Saved(File), FrameshardUtf8(Conversation).c_str(), Number); },
		File);
}

int32 UFrameshardSubsystem::Ask(
	const FString& Text, const FFrameshardAskParams& Params, FFrameshardListener Listener, int64& Job, FString& Error)
{
	return Start(
		[&](const fs_job_options& Options, uint64_t& Number)
		{
			return Game->ask(
				FrameshardUtf8(Text), Options, Wrapped(std::move(Listener), Params.Timeline), &Number);
		},
		Params, Job, Error);
}

int32 UFrameshardSubsystem::ToolResults(const TMap<FString, FString>& Results, const FFrameshardAskParams& Params,
	FFrameshardListener Listener, int64& Job, FString& Error)
{
	return Start(
		[&](const fs_job_options& Options, uint64_t& Number)
		{
			std::map<std::string, std::string> Told;
			for (const auto& Result : Results)
			{
				Told[FrameshardUtf8(Result.Key)] = FrameshardUtf8(Result.Value);
			}
			return Game->tool_results(Told, Options, Wrapped(std::move(Listener), Params.Timeline), &Number);
		},
		Params, Job, Error);
}

int32 UFrameshardSubsystem::Start(const std::function<int32(const fs_job_options& Options, uint64_t& Number)>& Call,
	const FFrameshardAskParams& Params, int64& Job, FString& Error)
{
	Job = 0;
	if (!Game || !Game->client())
	{
		Error = NoSidecar();
		return FS_CONNECTION_LOST;
	}
	FFrameshardTexts Texts;
	fs_sampling Sampling;
	fs_sampling_init(&Sampling, sizeof Sampling);
	FrameshardFill(Sampling, Params, Texts);
	const std::vector<fs_image> Images = ImagesOf(Params);
	fs_job_options Options;
	fs_job_options_init(&Options, sizeof Options);
	Options.conversation = Texts.Text(Params.Conversation);
	Options.system = Texts.Text(Params.Persona);
	Options.sampling = &Sampling;
	Options.timeline = static_cast<uint64_t>(Params.Timeline);
	Options.window = static_cast<uint32_t>(Params.Window);
	Options.priority = static_cast<uint32_t>(Params.Priority);
	Options.warm_up = Params.bWarmUp ? 1 : 0;
	std::vector<fs_adapter> Adapters;
	for (const auto& Adapter : Params.Adapters)
	{
		Adapters.push_back({Texts.Text(Adapter.Key), Adapter.Value});
	}
	Options.adapters = Adapters.data();
	Options.n_adapters = static_cast<uint64_t>(Adapters.size());
	Options.deadline_ms = static_cast<uint64_t>(Params.DeadlineMs);
	Options.thinking = Params.Thinking == EFrameshardThinking::Off      ? "off"
	                   : Params.Thinking == EFrameshardThinking::Hidden ? "hidden"
	                                                                    : "shown";
	Options.thinking_tokens = static_cast<uint64_t>(Params.ThinkingTokens);
	Options.template_keywords = Texts.Text(Params.TemplateKeywords);
	Options.local_only = Params.bLocalOnly ? 1 : 0;
	const std::vector<fs_tool> Tools = Texts.Tools(Params.Tools);
	Options.tools = Tools.data();
	Options.n_tools = static_cast<uint64_t>(Tools.size());
	Options.tool_choice = Texts.Text(Params.ToolChoice);
	Options.images = Images.data();
	Options.n_images = static_cast<uint32_t>(Images.size());
	uint64_t Number = 0;
	const int32 Status = Call(Options, Number);
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
		Game->cancel(static_cast<uint64_t>(Job)); // the error for a job that has ended is ignored
	}
}

void UFrameshardSubsystem::CountTokens(const FString& Prompt,
	std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done)
{
	Count([&](std::function<void(const fs_event&)> Counted)
		{ return Game->count_tokens(FrameshardUtf8(Prompt), std::move(Counted)); },
		std::move(Done));
}

void UFrameshardSubsystem::CountChatTokens(const TArray<FFrameshardMessage>& Messages,
	const TArray<FFrameshardTool>& Tools,
	std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done)
{
	FFrameshardTexts Texts;
	std::vector<std::vector<fs_tool_call>> Calls;
	std::vector<fs_chat_message> Told;
	for (const FFrameshardMessage& Message : Messages)
	{
		std::vector<fs_tool_call>& Made = Calls.emplace_back();
		for (const FFrameshardToolCall& Call : Message.ToolCalls)
		{
			Made.push_back({Texts.Text(Call.CallId), Texts.Text(Call.Name), Texts.Text(Call.Arguments)});
		}
		Told.push_back({Texts.Text(Message.Role), Texts.Text(Message.Content), FS_NUL_TERMINATED,
			static_cast<uint32_t>(Made.size()), Made.data(), Texts.Text(Message.ToolCallId)});
	}
	Count([&](std::function<void(const fs_event&)> Counted)
		{ return Game->count_tokens(Told, Texts.Tools(Tools), std::move(Counted)); },
		std::move(Done));
}

void UFrameshardSubsystem::Count(const std::function<int32(std::function<void(const fs_event& Event)>)>& Call,
	std::function<void(int32 NTokens, int32 NLeft, int32 Code, const FString& Message)> Done)
{
	if (!Game || !Game->client())
	{
		Later([Done, Message = NoSidecar()] { Done(0, 0, FS_CONNECTION_LOST, Message); });
		return;
	}
	const fs_status Status = Call(
		[Done](const fs_event& Event)
		{
			Done(static_cast<int32>(Event.n_tokens), static_cast<int32>(Event.n_left), Event.status,
				FrameshardText(std::string_view(Event.text, Event.text_length)));
		});
	if (Status != FS_OK)
	{
		Later([Done, Status, Message = LastError()] { Done(0, 0, Status, Message); });
	}
}

void UFrameshardSubsystem::Embed(const TArray<FString>& Texts,
	std::function<void(const TArray<float>& Rows, int32 NDim, int32 Code, const FString& Message)> Done)
{
	if (!Game || !Game->client())
	{
		Later([Done, Message = NoSidecar()] { Done({}, 0, FS_CONNECTION_LOST, Message); });
		return;
	}
	std::vector<std::string> Told;
	for (const FString& Text : Texts)
	{
		Told.push_back(FrameshardUtf8(Text));
	}
	const fs_status Status = Game->embed(Told,
		[Done](const fs_event& Event)
		{
			TArray<float> Rows;
			for (uint64 Index = 0; Index < Event.n_rows * Event.n_dim; ++Index)
			{
				Rows.Add(Event.rows[Index]);
			}
			Done(Rows, static_cast<int32>(Event.n_dim), Event.status,
				FrameshardText(std::string_view(Event.text, Event.text_length)));
		});
	if (Status != FS_OK)
	{
		Later([Done, Status, Message = LastError()] { Done({}, 0, Status, Message); });
	}
}

void UFrameshardSubsystem::SetPriority(int64 Job, int32 Priority)
{
	if (Game && Game->client()) // else the job has ended
	{
		const fs_status Status = Game->set_priority(static_cast<uint64_t>(Job), static_cast<uint32_t>(Priority));
		if (Status != FS_UNKNOWN_JOB) // the job has ended
		{
			Report(Status);
		}
	}
}

void UFrameshardSubsystem::Tick(float)
{
	CallDue();
	if (const std::shared_ptr<frameshard::Game> Pumped = Game) // a listener may end the game instance
	{
		Pumped->pump(std::max(1, GetDefault<UFrameshardSettings>()->EventsPerFrame));
	}
}

ETickableTickType UFrameshardSubsystem::GetTickableTickType() const
{
	return IsTemplate() ? ETickableTickType::Never : ETickableTickType::Always;
}

bool UFrameshardSubsystem::IsTickableWhenPaused() const
{
	return true; // a client must poll while the game is paused, too
}

bool UFrameshardSubsystem::IsTickableInEditor() const
{
	return true;
}

TStatId UFrameshardSubsystem::GetStatId() const
{
	RETURN_QUICK_DECLARE_CYCLE_STAT(UFrameshardSubsystem, STATGROUP_Tickables);
}
