#pragma once

#include "CoreMinimal.h"

#include "GameFramework/Actor.h"

class APlayerController;
class UGameInstance;

class UWorld : public UObject {
  public:
    UGameInstance *GetGameInstance() const { return Instance; }
    template <class T> T *SpawnActor(const FVector &, const FRotator &) { return NewObject<T>(); }
    APlayerController *GetFirstPlayerController() const { return nullptr; }

    UGameInstance *Instance = nullptr; // not in Unreal
};
