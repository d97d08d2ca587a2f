/* The Unreal layer over tests/unreal_stubs, against a real sidecar: unreal_layer MODEL PYTHON */
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "Engine/GameInstance.h"
#include "Engine/World.h"

#include "FrameshardAsyncActions.h"
#include "FrameshardNpcComponent.h"
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

/* The engine's frames until `done`, a minute at most. */
template <class Done> void play(UFrameshardSubsystem &sidecar, Done done) {
    auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!done() && std::chrono::steady_clock::now() < until) {
        sidecar.Tick(0.005f);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        return 2;
    }
    const char text[] = "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x88";
    check("carries text both ways", FrameshardUtf8(FrameshardText(text)) == text);

    UFrameshardSettings *settings = GetMutableDefault<UFrameshardSettings>();
    settings->Model = FrameshardText(argv[1]);
    settings->Python = FrameshardText(argv[2]);
    settings->Device = TEXT("emulated");
    settings->VramBudgetMb = 0;
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

    UFrameshardSetBudgetAsync *budget = UFrameshardSetBudgetAsync::SetFrameshardVramBudget(npc.get(), 1);
    int refused = 0, changed = 0, released = 0;
    budget->OnFailed.Listeners.push_back([&](const FString &, int32 code) { refused = code; });
    budget->Activate();
    play(sidecar, [&] { return refused != 0; });
    check("a budget below the floor is refused", refused == FS_BUDGET_BELOW_FLOOR && budget->Ready);
    budget = UFrameshardSetBudgetAsync::SetFrameshardVramBudget(npc.get(), 150);
    budget->OnReleased.Listeners.push_back([&](const FFrameshardBudget &now) { released = now.BudgetMb == 150; });
    sidecar.OnBudgetChanged.Listeners.push_back([&](const FFrameshardBudget &) { ++changed; });
    budget->Activate();
    play(sidecar, [&] { return changed > 0; });
    check("another is taken", released == 1 && changed == 1);

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

    npc->Ask(TEXT("Goodbye!"));
    npc->EndPlay(EEndPlayReason::Destroyed);
    npc.reset(); // and nobody calls it then
    sidecar.Deinitialize();
    check("ends in good order", lost == 0 && errors == 0 && !sidecar.IsReady());
    return failed != 0;
}
