/* Tests the Unreal plugin, built with tests/unreal_stubs, with a real sidecar: unreal_layer MODEL PYTHON MMPROJ */
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "Engine/GameInstance.h"
#include "Engine/World.h"

#include "FrameshardAsyncActions.h"
#include "FrameshardNpcComponent.h"
#include "FrameshardOptions.h"
#include "FrameshardSettings.h"
#include "FrameshardSubsystem.h"
#include "FrameshardText.h"

#include <frameshard.h>

namespace {

int failed = 0;

void check(const char *what, bool right) {
    std::printf("%s: %s\n", what, right ? "ok" : "FAILED");
    failed += right ? 0 : 1;
}

/* Runs frames until `done` returns true, at most for a minute. */
template <class Done> void play(UFrameshardSubsystem &sidecar, Done done) {
    auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!done() && std::chrono::steady_clock::now() < until) {
        sidecar.Tick(0.005f);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

/* Has a character and a node call a tool, and go on with the results. */
void call_tools(UFrameshardSubsystem &sidecar, UWorld &world) {
    FFrameshardTool price;
    price.Name = TEXT("price");
    price.Description = TEXT("The price of an item.");
    price.Schema = TEXT("{\"type\": \"object\", \"properties\": {\"item\": {\"enum\": [\"ale\"]}}, "
                        "\"required\": [\"item\"]}");
    UFrameshardNpcComponent npc;
    npc.World = &world;
    npc.Params.Conversation = TEXT("shop");
    npc.Params.Temperature = 0;
    npc.Params.MaxTokens = 200;
    npc.Params.Tools.Add(price);
    npc.Params.ToolChoice = price.Name;
    FFrameshardLogitBias end;
    end.Token = 2;  // <|im_end|>
    end.Bias = 100; // so that the answer ends after one call
    npc.Params.LogitBias.Add(end);

    TMap<FString, FString> results;
    int calls = 0, right = 0, errors = 0;
    EFrameshardReason reason = EFrameshardReason::Unknown;
    npc.OnToolCall.Listeners.push_back([&](const FString &name, const FString &arguments, const FString &call) {
        ++calls;
        right += name == price.Name && FrameshardUtf8(arguments).find("\"ale\"") != std::string::npos;
        results.Add(call, TEXT("2 gold"));
        npc.GiveToolResults(results); // before the answer has ended
    });
    npc.OnResponseGenerated.Listeners.push_back([&](const FFrameshardAnswer &whole) { reason = whole.Reason; });
    npc.OnError.Listeners.push_back([&](const FString &, int32 code) { errors += code == FS_BAD_ARGUMENT; });
    npc.Ask(TEXT("What does an ale cost?"));
    play(sidecar, [&] { return !npc.IsSpeaking(); });
    sidecar.Tick(0); // errors of a call come in the frame after it
    check("calls a tool", calls > 0 && right == calls && reason == EFrameshardReason::ToolCalls);
    check("refuses results before the answer has ended", errors == calls);

    const FFrameshardAskParams params = npc.Params;
    npc.Params.ToolChoice = TEXT("none");
    npc.Params.LogitBias = {};
    npc.Params.MaxTokens = 5;
    npc.GiveToolResults(results);
    play(sidecar, [&] { return !npc.IsSpeaking(); });
    check("goes on with results", reason != EFrameshardReason::ToolCalls && errors == calls);
    int kept = 0, asked = 0;
    const TArray<FFrameshardMessage> history = sidecar.History(params.Conversation);
    for (const FFrameshardMessage &message : history) {
        kept += message.Role == TEXT("tool") && message.Content == TEXT("2 gold") && !message.ToolCallId.IsEmpty();
        asked += message.ToolCalls.Num();
    }
    check("keeps calls and results in the history", kept == calls && asked == calls);
    auto count = [&](const TArray<FFrameshardTool> &tools) {
        int32 counted = 0;
        auto *node = UFrameshardCountTokensAsync::CountFrameshardChatTokens(&npc, history, tools);
        node->OnCounted.Listeners.push_back([&](int32 n_tokens, int32) { counted = n_tokens; });
        node->Activate();
        play(sidecar, [&] { return node->Ready; });
        return counted;
    };
    const int32 plain = count({});
    check("counts the tokens of tools", plain > 0 && count(params.Tools) > plain);

    results = {};
    int completed = 0, refused = 0;
    auto run = [&](UFrameshardAskAsync *node) {
        node->OnToolCall.Listeners.push_back(
            [&](const FString &, const FString &, const FString &call) { results.Add(call, TEXT("4 gold")); });
        node->OnCompleted.Listeners.push_back([&](const FFrameshardAnswer &) { ++completed; });
        node->OnFailed.Listeners.push_back([&](const FString &, int32 code) { refused = code; });
        node->Activate();
        play(sidecar, [&] { return node->Ready; });
    };
    run(UFrameshardAskAsync::AskFrameshard(&npc, TEXT("And two?"), params));
    run(UFrameshardAskAsync::GiveFrameshardToolResults(&npc, {}, npc.Params));
    check("a node needs all results", completed == 1 && refused == FS_BAD_ARGUMENT);
    run(UFrameshardAskAsync::GiveFrameshardToolResults(&npc, results, npc.Params));
    check("a node goes on with results", completed == 2);
}

/* What a game hears that has no sidecar. */
void play_without_a_sidecar(UFrameshardSettings &settings) {
    FSubsystemCollectionBase collection;
    UFrameshardSubsystem sidecar;
    UGameInstance instance;
    UWorld world;
    AActor actor;
    instance.Subsystem = &sidecar;
    world.Instance = &instance;
    check("starts", sidecar.ShouldCreateSubsystem(&instance));
    instance.Dedicated = true;
    check("does not start on a dedicated server", !sidecar.ShouldCreateSubsystem(&instance));

    settings.NCtx = 0;
    sidecar.Initialize(collection);
    settings.NCtx = 4096;
    FString reason;
    int errors = 0;
    sidecar.OnError.Listeners.push_back([&](const FString &message, int32) { reason = message, ++errors; });
    sidecar.Tick(0);
    check("says why the launch at start has failed", FrameshardUtf8(reason).find("n_ctx") != std::string::npos);

    UFrameshardNpcComponent npc;
    npc.Owner = &actor;
    npc.World = &world;
    int tries = 0;
    npc.OnError.Listeners.push_back([&](const FString &message, int32) {
        reason = message;
        ++tries;
        npc.Ask(TEXT("again")); // would be an endless recursion
    });
    npc.Ask(TEXT("Hello?"));
    sidecar.Tick(0);
    sidecar.Tick(0);
    check("a retry waits for the next frame", tries == 2);
    check("a question says why, too", FrameshardUtf8(reason).find("n_ctx") != std::string::npos);
    npc.OnError.Listeners.clear();

    errors = 0;
    int answers = 0;
    sidecar.OnKv.Listeners.push_back([&](const FFrameshardKv &) { ++answers; });
    sidecar.SaveKv(TEXT("Mira"), TEXT("mira.kv"));
    sidecar.LoadKv(TEXT("mira.kv"), TEXT("Mira"));
    sidecar.LoadAdapter(TEXT("accent"), TEXT("accent.gguf"));
    sidecar.UnloadAdapter(TEXT("accent"));
    sidecar.SetPacing(EFrameshardSchedulingMode::Balance, 0);
    sidecar.Forget(TEXT("Mira"));
    sidecar.History(TEXT("Mira"));
    sidecar.SetPriority(3, 2); // of a job that has ended
    sidecar.Tick(0);
    check("refuses every request", errors == 7 && answers == 0);

    const FString python = settings.Python;
    settings.Python = TEXT("/bin/false");
    sidecar.OnError.Listeners.push_back([&](const FString &, int32) { sidecar.Deinitialize(); });
    sidecar.Launch();
    play(sidecar, [&] { return errors == 8; });
    check("may end in a listener", errors == 8 && !sidecar.IsReady());
    settings.Python = python;
}

/* Launches again. `ended` is a node whose answer has ended in an earlier session. */
void refuse_frame_times(UFrameshardSubsystem &sidecar, UFrameshardSettings &settings, UFrameshardAskAsync &ended) {
    int refused = 0, ready = 0, lost = 0;
    sidecar.OnReady.Listeners.push_back([&] { ++ready; });
    sidecar.OnError.Listeners.push_back([&](const FString &message, int32 code) {
        refused += code == FS_BAD_ARGUMENT && FrameshardUtf8(message).find("target_frame_s") != std::string::npos;
        ++lost;
    });
    settings.TargetFrameMs = 20000;
    settings.EventsPerFrame = 0; // is 1
    sidecar.Launch();
    play(sidecar, [&] { return refused > 0; });
    settings.TargetFrameMs = 16.7;
    settings.EventsPerFrame = 64;
    check("refuses a frame time out of range", ready == 1 && refused == 1 && lost == 1);

    constexpr int questions = 24; // more than the earlier session had, so that one has the node's number
    int ends = 0, cancelled = 0;
    FFrameshardAskParams params;
    params.MaxTokens = 1;
    params.Conversation = TEXT("queue"); // so that all but the first one still wait when the node is cancelled
    for (int i = 0; i < questions; ++i) {
        FFrameshardListener listener;
        listener.OnEnd = [&](const FFrameshardAnswer &, int32 code, const FString &) {
            ++ends;
            cancelled += code == FS_CANCELLED;
        };
        int64 job = 0;
        FString error;
        sidecar.Ask(TEXT("Hello!"), params, std::move(listener), job, error);
    }
    ended.Cancel();
    play(sidecar, [&] { return ends == questions; });
    check("a node of an earlier session cancels nothing", ends == questions && cancelled == 0);
    sidecar.OnReady.Listeners.pop_back();
    sidecar.OnError.Listeners.pop_back();
}

/* Requests whose session is closed get an error each, and a path in the project's Saved folder is resolved. */
void close_with_requests(UFrameshardSubsystem &sidecar) {
    int closed = 0, answers = 0;
    sidecar.OnError.Listeners.push_back([&](const FString &, int32 code) { closed += code == FS_CANCELLED; });
    sidecar.OnKv.Listeners.push_back([&](const FFrameshardKv &) { ++answers; });
    sidecar.SaveKv(TEXT("Mira"), TEXT("mira.kv"));
    sidecar.UnloadAdapter(TEXT("accent"));
    sidecar.Close();
    sidecar.Tick(0);
    check("a close answers requests", closed == 2 && answers == 0);
    FFrameshardTexts texts;
    TArray<FString> adapters;
    adapters.Add(TEXT("mira=npc/mira.gguf"));
    adapters.Add(TEXT("nonsense"));
    const char *const *made = texts.Adapters(adapters);
    check("resolves paths", std::string(made[0]) == "mira=/nowhere/Content/npc/mira.gguf" &&
                                std::string(made[1]) == "nonsense" &&
                                std::string(texts.Saved(TEXT("a.kv"))) == "/nowhere/Saved/a.kv");
    sidecar.OnError.Listeners.pop_back();
    sidecar.OnKv.Listeners.pop_back();
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 4) {
        return 2;
    }
    const char text[] = "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x88";
    check("carries text both ways", FrameshardUtf8(FrameshardText(text)) == text);

    UFrameshardSettings *settings = GetMutableDefault<UFrameshardSettings>();
    settings->Model = FrameshardText(argv[1]);
    settings->Python = FrameshardText(argv[2]);
    settings->Mmproj = FrameshardText(argv[3]);
    settings->Device = TEXT("emulated");
    settings->KvType = TEXT("f16");
    settings->NThreads = 1;
    settings->VramBudgetMb = 0;
    play_without_a_sidecar(*settings);
    FSubsystemCollectionBase collection;
    UFrameshardSubsystem sidecar;
    UGameInstance instance;
    UWorld world;
    AActor actor;
    instance.Subsystem = &sidecar;
    world.Instance = &instance;
    actor.Name = TEXT("Mira");

    int ready = 0, lost = 0;
    sidecar.OnReady.Listeners.push_back([&] { ++ready; });
    sidecar.OnError.Listeners.push_back([&](const FString &, int32) { ++lost; });
    sidecar.Initialize(collection);

    FString token, answer;
    int sentences = 0, answers = 0, errors = 0;
    auto npc = std::make_unique<UFrameshardNpcComponent>();
    npc->Owner = &actor;
    npc->World = &world;
    npc->Params.Persona = TEXT("You are Mira, a friendly innkeeper.");
    npc->Params.Temperature = 0;
    npc->Params.MaxTokens = 40;
    npc->OnTokenGenerated.Listeners.push_back([&](const FString &piece) { token += piece; });
    npc->OnSentenceGenerated.Listeners.push_back([&](const FString &) { ++sentences; });
    npc->OnResponseGenerated.Listeners.push_back(
        [&](const FFrameshardAnswer &whole) { answer = whole.Text, ++answers; });
    npc->OnError.Listeners.push_back([&](const FString &, int32) { ++errors; });
    npc->Ask(TEXT("Who are you?"));
    check("speaks at once", npc->IsSpeaking());
    play(sidecar, [&] { return answers > 0; });
    check("is ready", ready == 1 && sidecar.IsReady());
    check("answers", answers == 1 && !answer.IsEmpty() && answer == token && sentences > 0 && !npc->IsSpeaking());

    const FString mira = npc->GetConversation();
    check("names a conversation by the actor's path", mira == TEXT("/Game/Town.Town:PersistentLevel.Mira"));
    const TArray<uint8> saved = sidecar.Save(mira);
    sidecar.Forget(mira);
    check("forgets", sidecar.History(mira).Num() == 1); // the persona stays
    FFrameshardLoadResult loaded;
    check("loads a save", sidecar.Load(saved, mira, loaded) && loaded.bSameModel && loaded.bSameTemplate);
    const TArray<FFrameshardMessage> told = sidecar.History(mira);
    check("knows what was said",
          told.Num() == 3 && told.GetData()[1].Content == TEXT("Who are you?") && told.GetData()[2].Content == answer);
    int bad = 0;
    sidecar.OnError.Listeners.push_back([&](const FString &, int32 code) { bad += code == FS_BAD_SAVE; });
    TArray<uint8> damaged;
    damaged.Append(saved.GetData(), saved.Num() - 1);
    check("refuses a damaged save", !sidecar.Load(damaged, mira, loaded) && bad == 0);
    sidecar.Tick(0);
    check("says so in the next frame", bad == 1);
    lost = 0;

    UFrameshardSetLeaseAsync *budget = nullptr;
    int refused = 0, changed = 0, released = 0;
    for (double megabytes : {1.0, 1e-12}) { // the second is the rest of a subtraction
        refused = 0;
        budget = UFrameshardSetLeaseAsync::SetFrameshardVramBudget(npc.get(), megabytes);
        budget->OnFailed.Listeners.push_back([&](const FString &, int32 code) { refused = code; });
        budget->Activate();
        play(sidecar, [&] { return refused != 0; });
        check("a budget below the floor is refused", refused == FS_BUDGET_BELOW_FLOOR && budget->Ready);
    }
    budget = UFrameshardSetLeaseAsync::SetFrameshardVramBudget(npc.get(), 150);
    budget->OnReleased.Listeners.push_back([&](const FFrameshardBudget &now) { released = now.BudgetMb == 150; });
    sidecar.OnBudgetChanged.Listeners.push_back([&](const FFrameshardBudget &) { ++changed; });
    budget->Activate();
    play(sidecar, [&] { return changed > 0; });
    check("another is taken", released == 1 && changed == 1);

    FFrameshardLease lease;
    lease.VramBudgetMb = 150;
    lease.State = EFrameshardLeaseState::Parked;
    lease.Version = 7;
    lease.Reason = TEXT("cut scene");
    int decided = 0, states = 0;
    auto propose = [&] {
        UFrameshardSetLeaseAsync *node = UFrameshardSetLeaseAsync::SetFrameshardLease(npc.get(), lease);
        node->OnDecided.Listeners.push_back([&](const FFrameshardDecision &decision) {
            decided += decision.Decision == EFrameshardDecision::Granted && decision.Version == lease.Version;
        });
        node->OnFailed.Listeners.push_back([&](const FString &, int32 code) { refused = code; });
        node->Activate();
        return node;
    };
    sidecar.OnNotice.Listeners.push_back([&](const FFrameshardNotice &notice) {
        states += notice.Kind == EFrameshardNoticeKind::State && notice.Text == TEXT("parked");
    });
    UFrameshardSetLeaseAsync *parked = propose();
    play(sidecar, [&] { return parked->Ready && states > 0; });
    check("parks, and a notice says so", decided == 1 && changed == 2 && states == 1);
    refused = 0;
    UFrameshardSetLeaseAsync *late = propose(); // with the same version as the lease before
    play(sidecar, [&] { return late->Ready; });
    check("a late lease is refused", refused == FS_STALE_LEASE && changed == 2);
    lease.State = EFrameshardLeaseState::Active;
    lease.FloorMb = 100;
    lease.Version = 8;
    UFrameshardSetLeaseAsync *active = propose();
    play(sidecar, [&] { return active->Ready; });
    check("becomes active again", decided == 2 && changed == 3);
    std::vector<EFrameshardEngineState> engine;
    sidecar.OnEngine.Listeners.push_back(
        [&](EFrameshardEngineState state, int32, const FString &) { engine.push_back(state); });
    lease.State = EFrameshardLeaseState::Hibernated;
    lease.Version = 9;
    propose();
    play(sidecar, [&] { return !engine.empty(); });
    lease.State = EFrameshardLeaseState::Active;
    lease.Version = 10;
    propose();
    play(sidecar, [&] { return changed == 5 && !engine.empty() && engine.back() == EFrameshardEngineState::Ready; });
    check("tells of the engine", !engine.empty() && engine.front() == EFrameshardEngineState::Hibernated);
    lease.HostBudgetMb = std::numeric_limits<double>::quiet_NaN();
    refused = 0;
    UFrameshardSetLeaseAsync *undefined = propose();
    play(sidecar, [&] { return undefined->Ready; });
    check("a host budget that is no number is refused", refused == FS_BAD_ARGUMENT && changed == 5);
    sidecar.SetPacing(EFrameshardSchedulingMode::PrioritizeCompute, 0);
    check("has no unknown feature", !sidecar.HasFeature(TEXT("songs")));

    auto ask = [&](const FFrameshardAskParams &params, std::function<void(const FFrameshardProgress &)> progress) {
        FFrameshardAnswer ended;
        int32 status = -1;
        FFrameshardListener listener;
        listener.OnProgress = progress;
        listener.OnEnd = [&](const FFrameshardAnswer &whole, int32 code, const FString &) {
            ended = whole;
            status = code;
        };
        int64 job = 0;
        FString error;
        int32 code = sidecar.Ask(TEXT("Count: 1, 2, 3, 4, 5, 6,"), params, listener, job, error);
        if (code != FS_OK) {
            status = code;
        }
        play(sidecar, [&] { return status >= 0; });
        return std::make_pair(status, ended);
    };
    FFrameshardAskParams params;
    params.Temperature = 0;
    params.MaxTokens = 24;
    params.Timeline = 3;
    auto whole = ask(params, {});
    const std::string said = FrameshardUtf8(whole.second.Text);
    check("says how it ended", whole.first == FS_OK && whole.second.Timeline == 3 && said.size() > 4 &&
                                   whole.second.Reason != EFrameshardReason::Unknown);
    if (said.size() > 4) {
        params.Stop.Add(FrameshardText(said.substr(2, 2)));
    }
    auto stopped_early = ask(params, {});
    check("ends before a stop string", stopped_early.second.Reason == EFrameshardReason::Stop &&
                                           FrameshardUtf8(stopped_early.second.Text) == said.substr(0, 2));
    params.Stop = {};
    params.JsonSchema = TEXT("{\"enum\": [\"yes\", \"no\"]}");
    const std::string fitted = FrameshardUtf8(ask(params, {}).second.Text);
    check("fits a JSON schema", fitted == "\"yes\"" || fitted == "\"no\"");
    params.JsonSchema = TEXT("");
    params.MaxTokens = 1;
    FFrameshardImage image;
    image.Format = EFrameshardImageFormat::Rgb;
    image.Width = image.Height = 8;
    image.Data.Init(255, 191); // one byte less than the image needs
    params.Images.Add(image);
    check("a wrong image is refused", ask(params, {}).first == FS_BAD_ARGUMENT);
    params.Images = {};
    image.Data.Init(255, 192);
    params.Images.Add(image);
    bool encoded = false;
    auto seen = ask(params, [&](const FFrameshardProgress &progress) {
        encoded = encoded || progress.Phase == EFrameshardPhase::Encode;
    });
    check("an image is more to read",
          seen.first == FS_OK && encoded && seen.second.PromptTokens > whole.second.PromptTokens);

    call_tools(sidecar, world);

    npc->Params.MaxTokens = 800;
    token = TEXT("");
    npc->Ask(TEXT("Count as far as you can."));
    play(sidecar, [&] { return !token.IsEmpty(); });
    npc->StopGeneration();
    const FString stopped = token;
    UFrameshardAskAsync *node = UFrameshardAskAsync::AskFrameshard(npc.get(), TEXT("Hello!"), npc->Params);
    int cancelled = 0;
    bool began = false;
    node->OnToken.Listeners.push_back([&](const FString &) { began = true; });
    node->OnFailed.Listeners.push_back([&](const FString &, int32 code) { cancelled = code; });
    node->Activate();
    play(sidecar, [&] { return began; });
    check("is silent when stopped", token == stopped && !npc->IsSpeaking());
    node->Cancel();
    play(sidecar, [&] { return cancelled != 0; });
    check("a node is cancelled", cancelled == FS_CANCELLED && node->Ready);

    refuse_frame_times(sidecar, *settings, *node);
    close_with_requests(sidecar);
    lost = 0;

    npc->Ask(TEXT("Goodbye!"));
    npc->EndPlay(EEndPlayReason::Destroyed);
    npc.reset(); // nothing may call the component after this
    UFrameshardNpcComponent last;
    last.Owner = &actor;
    last.World = &world;
    last.OnError.Listeners.push_back([&](const FString &, int32) {
        sidecar.Launch(); // too late: the game ends
        last.Ask(TEXT("Still there?"));
    });
    last.Ask(TEXT("Hello?"));
    lost = 0;
    sidecar.Deinitialize();
    sidecar.Launch();
    sidecar.Connect(TEXT("connect.json"));
    check("ends in good order", errors == 0 && !sidecar.IsReady());
    instance.Subsystem = nullptr;
    last.Ask(TEXT("Is there no sidecar at all?"));
    return failed != 0;
}
