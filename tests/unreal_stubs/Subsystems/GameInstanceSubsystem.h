#pragma once

#include "CoreMinimal.h"

class FSubsystemCollectionBase {};

class UGameInstanceSubsystem : public UObject {
  public:
    using Super = UGameInstanceSubsystem; // of the classes made from it
    virtual void Initialize(FSubsystemCollectionBase &) {}
    virtual void Deinitialize() {}
};
