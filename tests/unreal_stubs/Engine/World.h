#pragma once

#include "CoreMinimal.h"

#include "GameFramework/Actor.h"

class APlayerController;
class UGameInstance;

class UWorld : public UObject {
  public:
    UGameInstance *GetGameInstance() const { return Instance; }
    static FString RemovePIEPrefix(const FString &Source, int32 * = nullptr) {
        const std::u16string Text = *Source, Prefix = u"UEDPIE_0_";
        const size_t At = Text.find(Prefix);
        return At == Text.npos ? Source : FString((Text.substr(0, At) + Text.substr(At + Prefix.size())).c_str());
    }
    template <class T> T *SpawnActor(const FVector &, const FRotator &) { return NewObject<T>(); }
    APlayerController *GetFirstPlayerController() const { return nullptr; }

    UGameInstance *Instance = nullptr; // not in Unreal
};
