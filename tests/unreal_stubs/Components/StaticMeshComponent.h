#pragma once

#include "CoreMinimal.h"

class UStaticMesh;

class USceneComponent : public UObject {
  public:
    void SetupAttachment(USceneComponent *) {}
    void SetRelativeLocation(const FVector &) {}
    void SetRelativeScale3D(const FVector &) {}
};
class UStaticMeshComponent : public USceneComponent {
  public:
    bool SetStaticMesh(UStaticMesh *) { return true; }
};
