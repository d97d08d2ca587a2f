#pragma once

#include "CoreMinimal.h"

enum class ETickableTickType : unsigned char { Conditional, Always, Never };

class FTickableGameObject {
  public:
    virtual ~FTickableGameObject() = default;
    virtual void Tick(float DeltaTime) = 0;
    virtual ETickableTickType GetTickableTickType() const { return ETickableTickType::Conditional; }
    virtual bool IsTickableWhenPaused() const { return false; }
    virtual bool IsTickableInEditor() const { return false; }
    virtual TStatId GetStatId() const = 0;
};
