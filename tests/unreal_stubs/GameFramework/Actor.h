#pragma once

#include "CoreMinimal.h"

class USceneComponent;
class UWorld;

class AActor : public UObject {
  public:
    UWorld *GetWorld() const override { return World; }

    USceneComponent *RootComponent = nullptr;
    UWorld *World = nullptr; // not in Unreal

  protected:
    virtual void BeginPlay() {}
};
