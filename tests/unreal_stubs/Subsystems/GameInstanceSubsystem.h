#pragma once

#include "CoreMinimal.h"

class FSubsystemCollectionBase {};

class UGameInstanceSubsystem : public UObject {
  public:
    using Super = UGameInstanceSubsystem; // for derived classes
    virtual bool ShouldCreateSubsystem(UObject *) const { return true; }
    virtual void Initialize(FSubsystemCollectionBase &) {}
    virtual void Deinitialize() {}
};
