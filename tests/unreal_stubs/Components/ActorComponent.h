#pragma once

#include "CoreMinimal.h"

#include "GameFramework/Actor.h"

namespace EEndPlayReason {
enum Type { Destroyed, LevelTransition, EndPlayInEditor, RemovedFromWorld, Quit };
}

class UActorComponent : public UObject {
  public:
    using Super = UActorComponent; // for derived classes
    AActor *GetOwner() const { return Owner; }
    UWorld *GetWorld() const override { return World; }
    virtual void EndPlay(const EEndPlayReason::Type) {}

    AActor *Owner = nullptr; // not in Unreal
    UWorld *World = nullptr; // not in Unreal
};
